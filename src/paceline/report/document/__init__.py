"""A report to hand in or to attach: as a PDF and as Markdown, from the same records as the page."""
