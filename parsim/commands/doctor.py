"""`parsim doctor`: what this machine has, what will work, what is missing and how to get it."""

from __future__ import annotations

from parsim.commands.output import JsonFlag, print_json, print_tables
from parsim.workflow.progress import progress


def doctor(as_json: JsonFlag = False) -> None:
    """Check this machine: hardware and packages, which commands work here, and how to get what is missing."""
    from parsim.workflow.doctor import examine, sentence, tables

    with progress("Examining this machine"):
        findings = examine()
    if as_json:
        print_json(findings)
    else:
        print(sentence(findings), end="\n\n")
        print_tables(tables(findings))
