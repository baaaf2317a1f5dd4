"""Settings of the documentation's site (``make docs``), which loads nothing from the network."""

project = "mppo"
html_title = "mppo"
html_theme = "furo"
extensions = ["myst_parser"]
myst_heading_anchors = 4
exclude_patterns = ["images"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
