"""The look that pages share: colours, fonts, tables, buttons (`look.css`), one colour per worker.

    from paceline.look import WORKERS, css
    page = f"<style>{css()}</style>"

A page inlines the text of `css()` and then its own rules. Pictures that cannot read CSS variables
take their colours from `LIGHT` and `WORKERS`.
"""

from paceline.look.look import LIGHT, WORKERS, css, worker

__all__ = ["LIGHT", "WORKERS", "css", "worker"]
