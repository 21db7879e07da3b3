"""Draws timetables and split models: pictures (SVG, PNG), and a page that plays them.

from paceline.parallel.draw.explain import explain_halo, explain_timetables

Path("both.html").write_text(explain_timetables(("gpipe", "1f1b"), stages=4, micros=8).html())
Path("rows.svg").write_text(explain_halo("cnn", (1, 28, 28), workers=3).svg())
"""
