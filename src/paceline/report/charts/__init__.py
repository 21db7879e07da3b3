"""Charts as Vega-Lite descriptions, one file per subject."""
