"""What mkdocs does not do for this repository: links that leave docs/, and formulas as MathML.

A page may link to any file of the repository, as it does when it is read there. Such a file becomes
part of the site, at its path in the repository. Formulas become MathML, which browsers draw without
a script.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Pages of the site that lie outside of docs/.
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
_LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")
_FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([\[(])(.*?)\\[\])]</\1>', re.S)


def on_files(files: Files, config: Any) -> Files:
    """Adds every file outside of docs/ that a page links to."""
    pages = [file for file in files if file.is_documentation_page()]
    sources = [Path(str(page.abs_src_path)) for page in pages] + [ROOT / name for name in PAGES]
    wanted = {ROOT / name for name in PAGES}
    for source in sources:
        wanted |= {target for target in _targets(source) if not target.is_relative_to(DOCS)}
    for target in sorted(wanted):
        uri = target.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as they lead in the site."""
    source = Path(page.file.abs_src_path)
    here = Path(page.file.src_uri).parent

    def lead(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        inside = target.relative_to(DOCS if target.is_relative_to(DOCS) else ROOT)
        return match[1] + Path(os.path.relpath(inside, here)).as_posix() + match[3]

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(lead, part) for part in parts)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Formulas as MathML."""

    def draw(match: re.Match[str]) -> str:
        display = "block" if match[2] == "[" else "inline"
        return convert(html.unescape(match[3]), display=display)

    return _FORMULA.sub(draw, content)


def _targets(source: Path) -> set[Path]:
    text = _FENCE.sub("", source.read_text(encoding="utf-8"))
    found = ((source.parent / match[2]).resolve() for match in _LINK.finditer(text))
    return {target for target in found if target.is_file()}
