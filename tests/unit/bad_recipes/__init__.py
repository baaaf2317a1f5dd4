"""The tables of bad recipes: each row makes one mistake in a good recipe.

Rows: name, settings, the key and a part of the message. ``{file}`` and so on are what
``bad_recipe.write_files`` writes.
"""
