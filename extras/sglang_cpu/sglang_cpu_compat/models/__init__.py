"""Models SGLang knows without importing all its others (``SGLANG_EXTERNAL_MODEL_PACKAGE``)."""
