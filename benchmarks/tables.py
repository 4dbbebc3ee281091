"""Makes the tables of benchmarks/README.md from the newest record, so that no figure stands there without its commit.

    python -m benchmarks.tables          (`make tables`)

What lies between the two markers is replaced; the rest of the page is written by hand.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.record import Record, newest

PAGE = Path(__file__).resolve().parent / "README.md"
BEGIN, END = "<!-- made by `make tables`: begin -->", "<!-- made by `make tables`: end -->"


def tables(record: Record) -> str:
    """The generated part of the page."""
    machine = record.machine
    state = {None: "", True: ", with uncommitted changes", False: ""}[record.dirty]
    gpus = f"{len(machine['gpus'])} × {machine['gpus'][0]}"
    lines = [
        f"Commit `{record.commit[:12]}`{state}, {record.date}: {gpus}, driver {machine['driver']}, torch "
        f"{machine['torch']}, triton {machine['triton']}, transformers {machine['transformers']}, {machine['cores']} "
        "cores.",
        "",
    ]
    tests = record.parts.get("tests", {}).get("closing")
    lines += [f"Tests marked `gpu`: {tests}." if tests else "Tests marked `gpu`: not run.", ""]
    lines += ["| measured | value | |", "|---|---|---|"]
    lines += [f"| {name} | {figure.value:,.4g} | {figure.unit} |" for name, figure in record.figures.items()]
    lines += [f"| {name} | not run | {reason} |" for name, reason in record.not_run.items()]
    for name in sorted({name.rpartition(", ")[0] for name in record.figures if name.startswith("peers ")}):
        ours, theirs = record.figures.get(f"{name}, dflash graph"), record.figures.get(f"{name}, specforge")
        if ours is not None and theirs is not None:
            lines += [
                "",
                f"{name.removeprefix('peers ')}: SpecForge's step takes {theirs.value / ours.value:.2f} times ours.",
            ]
    lines += ["", "Fell back: " + ("; ".join(record.fallbacks) or "nothing") + "."]
    lines += ["", "Failed: " + ("; ".join(record.failures) or "nothing") + "."]
    return "\n".join(lines)


def with_tables(page: str, record: Record) -> str:
    """The page with its generated part made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables(record)}\n\n{END}{after}"


def main() -> None:
    """Rewrite the page."""
    record = newest()
    if record is None:
        raise SystemExit("no record in benchmarks/results: run `make gpu` on a machine with a GPU")
    PAGE.write_text(with_tables(PAGE.read_text(), record))


if __name__ == "__main__":
    main()
