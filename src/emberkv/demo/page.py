"""stub"""
from pathlib import Path
from emberkv.demo.report import Report
def write_html(report: Report, path: Path) -> None:
    path.write_text("")
