"""What Sphinx would do again for each page of the site, done once: a quarter of the time that the site takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

__all__ = ["navigate_by_titles", "stem_once"]


def navigate_by_titles(app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: object) -> None:
    """Of Sphinx's event html-page-context, before the theme's handler: the navigation beside a page.

    The theme wants titles alone. Sphinx would copy all sections of all pages, and then drop them.
    """
    whole: Callable[..., str] | None = context.get("toctree")
    if whole is None:
        return

    def toctree(**options: Any) -> str:
        if not options.get("titles_only"):
            return whole(**options)
        kept, app.env.tocs = app.env.tocs, _titles(app)
        try:
            return whole(**options)
        finally:
            app.env.tocs = kept

    context["toctree"] = toctree


def stem_once(app: Sphinx, *_: object) -> None:
    """Of the same event: most words of a page, of which the index of the search has the stems, are on others too."""
    language = getattr(getattr(app.builder, "indexer", None), "lang", None)
    if language is not None and not hasattr(language.stem, "cache_info"):
        language.stem = functools.cache(language.stem)


@functools.cache
def _titles(app: Sphinx) -> dict[str, nodes.bullet_list]:
    """The contents of each page without its sections: its title, and the pages below it."""
    return {name: _without_sections(toc.deepcopy()) for name, toc in app.env.tocs.items()}


def _without_sections(toc: nodes.bullet_list) -> nodes.bullet_list:
    for entry in toc.children:
        if isinstance(entry, nodes.list_item) and len(entry) > 1:
            below = list(entry.findall(addnodes.toctree))
            if below:
                entry[1].children = []
                entry[1].extend(below)
            else:
                entry.pop(1)
    return toc
