"""Show a comparison in the terminal, as Markdown and as an HTML page."""
