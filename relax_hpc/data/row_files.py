"""Files of rows that one setting names: a file, or the files of a split of a folder.

A folder was saved by `datasets` (`save_to_disk`), or has the layout of a repository on the Hugging
Face hub: jsonl or parquet files, whose splits are given by its README.md or by the file names.
`FOLDER#SPLIT` names one of several splits.
"""

from __future__ import annotations

import bisect
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import read_json_object, read_regular
from relax_hpc.config.schema import DataConfig
from relax_hpc.data.rows import BadLine, Row, count_rows, is_table, read_rows

Splits = dict[str, list[Path]]
SUFFIXES = (".jsonl", ".parquet", ".arrow")
"""Suffixes of the files in a folder that are read."""
_OTHER_FORMATS = (".json", ".csv", ".tsv", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".csv.gz")
"""Suffixes of files with rows that `datasets` reads, and this module does not."""
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that describe data sets, and have no rows."""
_SPLIT_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> keywords in the names of its files and folders, the same as in `datasets`."""
_README_BYTES = 16 << 20
_SHARD = re.compile(r"(\w+)-\d{5}-of-\d{5}")
_BETWEEN_WORDS = re.compile(r"[-._ 0-9]+")


@dataclass(frozen=True, slots=True)
class RowFiles:
    """Files of rows, in their order."""

    named: str
    """Name of the files in the configuration."""
    paths: tuple[Path, ...]
    folder: Path
    """Folder that paths of media are relative to."""

    @classmethod
    def from_path(cls, named: str | Path, expected: str = "") -> RowFiles:
        """Files that ``named`` refers to: a file, a folder, or a folder with a split, as
        `prompts#test`. ``expected``: the split that a folder without a named split must have;
        empty: any. ConfigError: no files are found, or the split is not clear."""
        folder, split = folder_and_split(named)
        if not folder.is_dir():
            return cls(str(named), (folder,), folder.parent)
        splits, unread = _splits(folder)
        allowed = ", ".join(f"{folder}#{name}" for name in splits)
        if split and split not in splits:
            raise ConfigError(f"{named}: found no such split, allowed: {allowed}")
        if not split and len(splits) > 1:
            raise ConfigError(f"{named}: found a folder of several splits, allowed: {allowed}")
        if not split and unread:
            raise ConfigError(
                f"{named}: found {unread[0].relative_to(folder)}, which would not be read; move "
                f"such files away, or name a split: {allowed}"
            )
        if not split and expected and expected not in splits:
            raise ConfigError(
                f"{named}: found split {next(iter(splits))!r} alone, expected {expected!r}; if it "
                f"is meant, name it: {allowed}"
            )
        paths = splits[split or next(iter(splits))]
        folder = Path(os.path.commonpath([path.parent for path in paths]))
        return cls(str(named), tuple(paths), folder)

    of = from_path  # Name in release 0.1.

    def rows(self, locations: RowLocations, with_media: bool = False) -> Iterator[Row]:
        """Rows of all files, see `read_rows`. Row numbers continue from file to file. The number at
        which each file begins is added to ``locations``."""
        number = 0
        for path in self.paths:
            begin = number
            name = str(path.relative_to(self.folder)) if len(self.paths) > 1 else ""
            locations.begins.append((begin, name))
            for row in read_rows(path, with_media):
                if isinstance(row, BadLine):
                    number = begin + row.line
                    yield replace(row, line=number)
                else:
                    number = begin + row[0]
                    yield number, row[1]

    @property
    def lines(self) -> Path | None:
        """The only file, if its lines are the rows; None: several files, or a table."""
        return None if len(self.paths) > 1 or is_table(self.paths[0]) else self.paths[0]

    def count(self) -> int:
        """Number of rows in all files. ConfigError: a file cannot be read."""
        return sum(map(count_rows, self.paths))


@dataclass(slots=True)
class RowLocations:
    """File and line of rows whose numbers continue from file to file."""

    begins: list[tuple[int, str]] = field(default_factory=list)
    """Number of the row before the first one of each file, and the file's name. A single file has
    an empty name."""

    def describe(self, number: int) -> str:
        """File and line of a row, for messages.

        >>> locations = RowLocations([(0, "a.jsonl"), (7, "b.jsonl")])
        >>> locations.describe(7), locations.describe(8), RowLocations().describe(8)
        ('a.jsonl, line 7', 'b.jsonl, line 1', 'line 8')
        """
        before = bisect.bisect_left(self.begins, (number,)) - 1
        begin, name = self.begins[before] if before >= 0 else (0, "")
        return f"{name}, line {number - begin}" if name else f"line {number}"


Places = RowLocations  # Name in release 0.1.


def folder_and_split(named: str | Path) -> tuple[Path, str]:
    """Path, and the split after `#`, if any.

    >>> folder_and_split("/data/prompts#test")
    (PosixPath('/data/prompts'), 'test')
    """
    whole = Path(named)
    path, mark, split = str(named).rpartition("#")
    return (Path(path), split) if mark and path and not whole.exists() else (whole, "")


@dataclass(frozen=True, slots=True)
class DataSet:
    """A set of rows that a configuration names."""

    setting: str
    """Setting that names it, such as `data.eval.test`."""
    name: str
    path: str
    """A file, a folder, or a folder with a split."""
    split: str = ""
    """Split that a folder must have; empty: any split."""

    def files(self) -> RowFiles:
        """Files of the set. ConfigError: see `RowFiles.from_path`."""
        return RowFiles.from_path(self.path, self.split)


def data_sets(data: DataConfig) -> list[DataSet]:
    """Sets of training rows, and of evaluations, for which a configuration names files."""
    sets = [DataSet("data.train", "train", data.train, "train")] if data.train else []
    for name, path in data.train_sets.items():
        sets.append(DataSet(f"data.train_sets.{name}", name, path, "train"))
    for name, path in data.eval.items():
        sets.append(DataSet(f"data.eval.{name}", name, path))
    return sets


def rows_exist(named: str | Path) -> bool:
    """Whether the file or folder exists."""
    path, _ = folder_and_split(named)
    return path.is_file() or path.is_dir()


def _splits(folder: Path) -> tuple[Splits, list[Path]]:
    """Files of each split of ``folder``, at least one, and files with rows that would not be read.
    ConfigError: no files are found, or a split has files of two formats."""
    try:
        splits, unread = _list_splits(folder)
    except (OSError, ValueError) as error:
        # A name in a file of another user may be too long, or contain a NUL.
        raise ConfigError(f"{folder}: its files cannot be listed: {error}") from error
    if not splits:
        raise ConfigError(
            f"{folder}: found a folder without rows, allowed: files whose names end with "
            f"{', '.join(SUFFIXES)}, or what save_to_disk of `datasets` has written"
        )
    for name, paths in splits.items():
        first = next((path for path in paths if path.suffix != paths[0].suffix), None)
        if first:
            raise ConfigError(
                f"{folder}: found {paths[0].name} and {first.name} of split {name!r}, which may "
                "hold the same rows; move the files of one format away"
            )
    return splits, unread


def _list_splits(folder: Path) -> tuple[Splits, list[Path]]:
    """Files of each split of ``folder``, and files with rows that would not be read. The first
    source that names a split counts: files of `save_to_disk`, README.md, file names. OSError,
    ValueError: a path cannot be looked up."""
    splits = _saved_splits(folder)
    if splits:
        return splits, []
    splits, unread = _readme_splits(folder)
    return (splits, unread) if splits else _splits_by_names(folder)


def _saved_splits(folder: Path) -> Splits:
    """Splits that `save_to_disk` of `datasets` has written: one in ``folder``, or several in
    sub-folders."""
    index = folder / "dataset_dict.json"
    splits = _read_object(index).get("splits")
    if splits:
        if not isinstance(splits, list):
            raise ConfigError(
                f"{index}: splits: found {str(splits)[:80]!r}, allowed: a list of names"
            )
        return {str(name): _state_files(_inside(folder, name, index)) for name in splits}
    return {"train": _state_files(folder)} if (folder / "state.json").is_file() else {}


def _state_files(folder: Path) -> list[Path]:
    """Files that the state.json in ``folder`` lists. ConfigError: one is missing."""
    state = folder / "state.json"
    try:
        names = [file["filename"] for file in _read_object(state)["_data_files"]]
    except (KeyError, TypeError):
        names = []
    paths = [_inside(folder, name, state) for name in names]
    if not paths or not all(path.is_file() for path in paths):
        raise ConfigError(f"{state}: names files that are not there; save the data set again")
    return paths


def _inside(folder: Path, name: Any, source: Path) -> Path:
    """Path of the file ``name`` in ``folder``; the file ``source`` there names it. ConfigError: the
    path leads out of the folder, where it could be a private file of the reader."""
    path = folder / str(name)
    leads_out = Path(str(name)).is_absolute() or ".." in path.parts[len(folder.parts) :]
    if leads_out or not _is_inside(path, folder):
        raise ConfigError(
            f"{source}: found {str(name)[:80]!r}, allowed: files inside of {folder}; correct it"
        )
    return path


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether the target of ``path`` is in ``folder``, or in the folder `blobs` that belongs to it.

    In the cache of the Hugging Face hub a repository has the folders `snapshots` and `blobs`. Files
    of a snapshot are links into `blobs`.
    """
    roots = [folder]
    for parent in folder.absolute().parents:
        if parent.name == "snapshots":
            roots.append(parent.parent / "blobs")
    target = Path(os.path.realpath(path))
    return any(target.is_relative_to(os.path.realpath(root)) for root in roots)


def _check_link(path: Path, folder: Path) -> None:
    """ConfigError: ``path`` is a link of another user that leads out of ``folder`` to a file that
    belongs to neither that user nor root, such as a private file of the reader."""
    if not path.is_symlink() or _is_inside(path, folder):
        return
    owner = path.lstat().st_uid
    if owner not in (os.geteuid(), 0, path.stat().st_uid):
        raise ConfigError(
            f"{path}: a link of another user to {os.path.realpath(path)}; name that file itself"
        )


def _readme_splits(folder: Path) -> tuple[Splits, list[Path]]:
    """Splits of the configurations in the README.md of a repository, and files that would not be
    read, see `_splits_by_names`. A split of another configuration than the default is called
    `CONFIGURATION/SPLIT`. ConfigError: README.md names files that are missing or outside of the
    folder, or a split twice."""
    readme = folder / "README.md"
    configs = _front_matter(readme).get("configs")
    entries = configs if isinstance(configs, list) else []
    configurations = [entry for entry in entries if isinstance(entry, Mapping)]
    all_splits: Splits = {}
    unread: list[Path] = []
    for entry in configurations:
        name = str(entry.get("config_name", "default"))
        is_default = len(configurations) == 1 or name == "default" or entry.get("default") is True
        root = _inside(folder, entry.get("data_dir") or "", readme)
        splits = _named_files(folder, root, entry.get("data_files"))
        if not splits and "data_dir" in entry:
            splits, unread_files = _splits_by_names(root)
            unread += unread_files
            if not splits:
                raise ConfigError(
                    f"{root}: found no rows in the data_dir of README.md; download the data set "
                    "again"
                )
        for split, paths in splits.items():
            all_splits[split if is_default else f"{name}/{split}"] = paths
    return all_splits, unread


def _named_files(folder: Path, root: Path, data_files: Any) -> Splits:
    """Files of each split by ``data_files``, an entry in the README.md of ``folder`` whose patterns
    are relative to ``root``, a folder inside."""
    readme = folder / "README.md"
    splits: Splits = {}
    for split, patterns in _patterns(data_files):
        paths: dict[Path, None] = {}
        for pattern in patterns:
            matches = [path for path in sorted(_glob(root, pattern, readme)) if path.is_file()]
            if not matches:
                raise ConfigError(
                    f"{root}: found no {pattern}, which README.md names; download the data set "
                    "again"
                )
            for path in matches:
                _inside(folder, path.relative_to(folder), readme)
            paths |= dict.fromkeys(matches)
        if split in splits:
            raise ConfigError(f"{root}: found split {split!r} twice in README.md, allowed: once")
        splits[split] = list(paths)
    return splits


def _glob(root: Path, pattern: Any, source: Path) -> Iterator[Path]:
    """Paths below ``root`` that match a ``pattern`` of the file ``source``. ConfigError: the
    pattern is invalid, or leads out of ``root``."""
    try:
        if not isinstance(pattern, str) or ".." in Path(pattern).parts:
            raise ValueError("it leaves the folder")
        yield from root.glob(pattern)
    except (ValueError, NotImplementedError, RecursionError) as error:
        raise ConfigError(
            f"{source}: data_files: found {str(pattern)[:80]!r} ({error}), allowed: patterns of "
            f"files inside of {root}"
        ) from error


def _patterns(data_files: Any) -> Iterator[tuple[str, Sequence[str]]]:
    """Splits with the patterns of their files. `data_files` of a README.md is a pattern, a list of
    patterns or of objects with `split` and `path`, or an object of split -> patterns."""
    if isinstance(data_files, Mapping):
        entries: list[Any] = [
            {"split": split, "path": patterns} for split, patterns in data_files.items()
        ]
    elif isinstance(data_files, list):
        entries = data_files
    else:
        entries = [data_files] if data_files else []
    texts = [entry for entry in entries if isinstance(entry, str)]
    if texts:
        entries = [*entries, {"path": texts}]
    for entry in entries:
        patterns = entry.get("path") if isinstance(entry, Mapping) else None
        if patterns:
            split = str(entry.get("split", "train"))
            yield split, patterns if isinstance(patterns, list) else [patterns]


def _splits_by_names(folder: Path) -> tuple[Splits, list[Path]]:
    """Files by the splits in their names, or in the names of their folders; `train` if no name
    contains a split.

    Also files that would not be read: files of other formats, and, if some names contain a split,
    files whose names do not.
    """
    splits: Splits = defaultdict(list)
    unread = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        is_hidden = any(name.startswith((".", "__")) for name in inside.parts)
        if is_hidden or not path.is_file():
            continue
        if path.suffix in SUFFIXES:
            _check_link(path, folder)
            splits[_split_of(inside)].append(path)
        elif path.name.endswith(_OTHER_FORMATS) and path.name not in _DESCRIPTIONS:
            unread.append(path)
    unnamed = splits.pop("", [])
    if splits:
        return dict(splits), [*unnamed, *unread]
    return ({"train": unnamed} if unnamed else {}), unread


def _split_of(path: Path) -> str:
    """Split in the name of a file, or in the names of its folders; empty: no name has one."""
    shard = _SHARD.match(path.stem)
    if shard:
        return shard[1]
    for name in (*path.parent.parts, path.stem):
        for keyword in _BETWEEN_WORDS.split(name.lower()):
            for split, keywords in _SPLIT_KEYWORDS.items():
                if keyword in keywords:
                    return split
    return ""


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if the file is missing. ConfigError: it cannot be read."""
    return read_json_object(path, "save the data set again", is_optional=True)


def _front_matter(path: Path) -> dict[str, Any]:
    """Content of the YAML between the first two lines of dashes of a README.md; {} if it has
    none."""
    try:
        text = read_regular(path, _README_BYTES).decode().replace("\r\n", "\n")
        content = yaml.safe_load(text.split("---\n", 2)[1]) if text.startswith("---\n") else {}
    except (OSError, ValueError, LookupError, RecursionError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
