"""The page of all settings, from their tables (twostep/settings): docs/settings.md."""

from __future__ import annotations

import textwrap

from helm_schema import SETTLED

from twostep.settings.known import TABLES
from twostep.settings.table import SettingRow, settings_of

HEAD = """# Settings

<!-- Written by scripts/helm-docs from twostep/settings; make check compares them. -->

Every process takes each of its settings as a flag, as a `TWOSTEP_` variable (`--max-num-seqs` is also
`TWOSTEP_MAX_NUM_SEQS`), and as a line of a YAML file:

    python -P -m decode_worker --config worker.yaml       # max-num-seqs: 128

A flag wins over a variable, that over the file (`TWOSTEP_CONFIG` names one, too), and that over the default, which stands
below in brackets. Whatever is unknown or makes no sense, alone or together, is refused by name, all of it at once, with what
may have been meant; a variable that nothing reads is warned of. `twostep up` takes the settings of all of them, and gives
each process its own. In the chart they are keys of `router.flags`, `workers.flags`, `prefill.flags`, `decode.flags` and
`autoscaling.flags`, apart from those marked with a star, which the chart sets itself ([helm-values.md](helm-values.md)).
"""

CHART = {"python -P -m router", "python -P -m prefill_worker, decode_worker", "python -P -m twostep.autoscaler"}


def page() -> str:
    parts = [HEAD]
    shown: set[str] = set()
    for title, table in TABLES.items():
        settings = settings_of(table)
        # What several processes share is described once.
        fresh = [each for each in settings if _item(each, False) not in shown]
        again = [f"`{each.flag}`" for each in settings if _item(each, False) in shown]
        shown.update(_item(each, False) for each in fresh)
        parts.append(f"## `{title}`\n\n" + "\n".join(_item(each, title in CHART) for each in fresh) + "\n")
        if again:
            parts.append(_wrapped(f"And, as above: {', '.join(again)}.") + "\n")
    parts.append("Settings that were removed, and what replaces each: [CHANGELOG.md](../CHANGELOG.md).\n")
    return "\n".join(parts)


def _item(each: SettingRow, in_chart: bool) -> str:
    given = each.flag if each.switch else f"{each.flag} {'|'.join(filter(None, each.choices)) or each.metavar or each.kind}"
    given = each.variable if each.secret else given
    default = f" ({each.default_text})" if each.default_text else ""
    star = " \\*" if in_chart and each.name in SETTLED else ""
    return _wrapped(f"- `{given}`{default}{star}: {each.help}")


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 120, subsequent_indent="  " if text.startswith("- ") else "", break_on_hyphens=False))
