"""The verb `labels`: what can be done with a preference store by itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from vla_rlaif.preferences.agreement import describe_agreement, measure_agreement, write_agreement
from vla_rlaif.preferences.store import PreferenceStore


def labels(
    action: Literal["export", "import", "agreement"], store: Path, file: Path | None, say: Callable[[str], None]
) -> None:
    if action != "import" and not store.exists():
        raise ValueError(f"no preference store at {store}; `vla-rlaif label` makes one.")
    if action == "import" and file is not None and not file.exists():
        raise ValueError(f"no Parquet file at {file}; `vla-rlaif labels export` writes one.")
    with PreferenceStore(store) as kept:
        if action == "agreement":
            found = measure_agreement(kept.records())
            for line in describe_agreement(found):
                say(line)
            write_agreement(found, store.with_suffix(".agreement.json") if file is None else file)
            return
        if file is None:
            raise ValueError(f"labels {action} needs --file: the Parquet file.")
        from vla_rlaif.preferences.parquet import export_parquet, import_parquet

        if action == "export":
            say(f"{file}: {export_parquet(kept, file)} records written, {kept.count} of them in force")
        else:
            num_new, num_known = import_parquet(file, kept)
            say(f"{store}: {num_new} records added, {num_known} were there already; {kept.count} in all")
