"""A reward model of transformers, in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from mppo.hub.builtin import load_tokenizer, read_model_config, resolve_model
from mppo.hub.local_model import check_model_folder
from mppo.parallel import device
from mppo.recipe.errors import ConfigError, ConfigIssue

KEY = "--model"


class SequenceClassifier:
    """Scores texts by the only output of a ``*ForSequenceClassification``.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        batch_size: most texts of a forward pass.
        max_length: most tokens of a text; of a longer one, only the last are read. None: no limit.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int,
        max_length: int | None,
    ) -> None:
        self.tokenizer, self._model = tokenizer, model
        self._batch_size, self._max_length = batch_size, max_length
        self._lock = threading.Lock()

    def score(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Score texts.

        Args:
            texts: the tokens of each; not empty.

        Raises:
            ValueError: a text has no tokens, or one that the model does not know.
        """
        limit = self._max_length
        ids = [list(text) if limit is None else list(text)[-limit:] for text in texts]
        size = self._model.get_input_embeddings().weight.shape[0]  # pyright: ignore
        if not all(text and min(text) >= 0 and max(text) < size for text in ids):
            raise ValueError(f"a text has no token, or one outside of the model's {size}")
        # texts of about the same length share a pass
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        scores: dict[int, float] = {}
        for start in range(0, len(order), self._batch_size):
            part = order[start : start + self._batch_size]
            with self._lock:
                found = self._forward([ids[index] for index in part])
            scores.update(zip(part, found, strict=True))
        return [scores[index] for index in range(len(ids))]

    @torch.inference_mode()
    def _forward(self, texts: list[list[int]]) -> list[float]:
        lengths_B = torch.tensor([len(text) for text in texts])
        ids_BL = torch.zeros(len(texts), int(lengths_B.max()), dtype=torch.int64)
        for row, text in enumerate(texts):
            ids_BL[row, : len(text)] = torch.tensor(text)
        mask_BL = (torch.arange(ids_BL.shape[1]) < lengths_B[:, None]).long()
        model, place = self._model, device.device()
        inputs = {"input_ids": ids_BL.to(place), "attention_mask": mask_BL.to(place)}
        head = getattr(model, "score", None)
        if head is None:  # an encoder, which reads the whole text
            return model(**inputs).logits[:, 0].float().tolist()
        # transformers finds the last token by the padding token, which may also end a text
        hidden_BLD = getattr(model, model.base_model_prefix)(**inputs).last_hidden_state  # pyright: ignore
        last_BD = hidden_BLD[torch.arange(len(texts)), lengths_B - 1]
        return head(last_BD)[:, 0].float().tolist()


def load_sequence_classifier(
    path: str, dtype: str, batch_size: int, max_length: int | None, trust_remote_code: bool
) -> SequenceClassifier:
    """Read a reward model and its tokenizer.

    Args:
        path: Hugging Face folder, or ``builtin:tiny-reward``.
        dtype: of the parameters.
        batch_size, max_length: as ``SequenceClassifier``.
        trust_remote_code: run Python code of the folder.

    Raises:
        ConfigError: no such folder, or its model does not end in one score.
    """
    issues = check_model_folder(KEY, path)
    if issues:
        raise ConfigError(issues)
    folder = resolve_model(path)
    try:
        config = read_model_config(folder, trust_remote_code)
        tokenizer = load_tokenizer(folder, trust_remote_code)
    except ConfigError as error:
        raise ConfigError([replace(issue, key=KEY) for issue in error.issues]) from error
    except ValueError as error:
        raise _refusal(path, str(error)) from error
    kinds = getattr(config, "architectures", None) or ["model of an unknown class"]
    if config.num_labels != 1 or not kinds[0].endswith("ForSequenceClassification"):
        raise _refusal(path, f"config.json describes a {kinds[0]} with {config.num_labels} labels")
    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder,
        config=config,
        dtype=getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    if report["missing_keys"]:
        raise _refusal(path, f"its weights lack {', '.join(sorted(report['missing_keys'])[:3])}")
    return SequenceClassifier(model.eval().to(device.device()), tokenizer, batch_size, max_length)


def _refusal(path: str, why: str) -> ConfigError:
    fix = "give a *ForSequenceClassification with one label, in Hugging Face form"
    return ConfigError([ConfigIssue(KEY, path, why, fix)])
