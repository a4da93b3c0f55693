"""The package, where Python runs beside this clone and the clone is named `frugalvit`: a folder without this file
would hide the installed package there. Its parts lie in several folders of the clone."""

from pathlib import Path


_CLONE = Path(__file__).parent
_PACKAGE = _CLONE / "frugalvit"
__path__ = __spec__.submodule_search_locations = [str(_PACKAGE), str(_CLONE)]
exec(compile((_PACKAGE / "__init__.py").read_text(encoding="utf-8"), _PACKAGE / "__init__.py", "exec"))
