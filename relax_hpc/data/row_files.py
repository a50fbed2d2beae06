"""Files of rows that one setting names: a file, or the files of a split of a folder.

A folder is one that `datasets` has saved (`save_to_disk`), or one like a repository of the Hugging
Face hub, with jsonl or parquet files whose splits its README.md names, or their own names.
`FOLDER#SPLIT` names one of several.
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
"""Names of files in a folder that have rows end so."""
_OTHER_FORMATS = (".json", ".csv", ".tsv", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".csv.gz")
"""Ends of names of files whose rows `datasets` reads, and this module does not."""
_ABOUT_SETS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that describe data sets."""
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> words in the names of its files and folders, as `datasets` knows them."""
_README_BYTES = 16 << 20
_SHARD = re.compile(r"(\w+)-\d{5}-of-\d{5}")
_BETWEEN_WORDS = re.compile(r"[-._ 0-9]+")


@dataclass(frozen=True, slots=True)
class RowFiles:
    """Files of rows, in their order."""

    named: str
    """Name of them in the configuration."""
    paths: tuple[Path, ...]
    folder: Path
    """Folder that paths of media are relative to."""

    @classmethod
    def of(cls, named: str | Path, expected: str = "") -> RowFiles:
        """Files that ``named`` means: a file, a folder, or a folder with a split, as
        `prompts#test`. ``expected``: the split that a folder without a named split must have;
        empty: any. ConfigError: there are none, or the split is not clear."""
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
        return cls(
            str(named), tuple(paths), Path(os.path.commonpath([path.parent for path in paths]))
        )

    def rows(self, places: Places, with_media: bool = False) -> Iterator[Row]:
        """Rows of all files, see `read_rows`, numbered through; ``places`` is told where those of
        each begin."""
        number = 0
        for path in self.paths:
            begin = number
            places.begins.append(
                (begin, str(path.relative_to(self.folder)) if len(self.paths) > 1 else "")
            )
            for row in read_rows(path, with_media):
                number = begin + (row.line if isinstance(row, BadLine) else row[0])
                yield replace(row, line=number) if isinstance(row, BadLine) else (number, row[1])

    @property
    def lines(self) -> Path | None:
        """The file, if there is one alone, whose lines are the rows."""
        return None if len(self.paths) > 1 or is_table(self.paths[0]) else self.paths[0]

    def count(self) -> int:
        """Rows of all files. ConfigError: one cannot be read."""
        return sum(map(count_rows, self.paths))


@dataclass(slots=True)
class Places:
    """Files in which rows stand that are numbered through."""

    begins: list[tuple[int, str]] = field(default_factory=list)
    """Number of the row before the first of each file, and the file's name; of the only one there
    is none."""

    def of(self, number: int) -> str:
        """Place of a row, in words.

        >>> places = Places([(0, "a.jsonl"), (7, "b.jsonl")])
        >>> places.of(7), places.of(8), Places().of(8)
        ('a.jsonl, line 7', 'b.jsonl, line 1', 'line 8')
        """
        before = bisect.bisect_left(self.begins, (number,)) - 1
        begin, name = self.begins[before] if before >= 0 else (0, "")
        return f"{name}, line {number - begin}" if name else f"line {number}"


def folder_and_split(named: str | Path) -> tuple[Path, str]:
    """Path, and the split that is named behind it, if any.

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
    """Split that a folder must have; empty: any."""

    def files(self) -> RowFiles:
        """Files of the set. ConfigError: see `RowFiles.of`."""
        return RowFiles.of(self.path, self.split)


def data_sets(data: DataConfig) -> list[DataSet]:
    """Sets of training rows, and of evaluations, that a configuration names files of."""
    sets = [DataSet("data.train", "train", data.train, "train")] if data.train else []
    for name, path in data.train_sets.items():
        sets.append(DataSet(f"data.train_sets.{name}", name, path, "train"))
    for name, path in data.eval.items():
        sets.append(DataSet(f"data.eval.{name}", name, path))
    return sets


def is_there(named: str | Path) -> bool:
    """Whether there is such a file, or folder."""
    path, _ = folder_and_split(named)
    return path.is_file() or path.is_dir()


def _splits(folder: Path) -> tuple[Splits, list[Path]]:
    """Files of each split of ``folder``, at least one of one, and files of rows that are of none.
    ConfigError: there are no rows, or a split has files of two formats."""
    try:
        splits, unread = _listed(folder)
    except (OSError, ValueError) as error:
        # A name that another user has written may be too long, or have a NUL in it.
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


def _listed(folder: Path) -> tuple[Splits, list[Path]]:
    """Files of each split of ``folder``, by what describes them, and files of no split. OSError,
    ValueError: it has, or names, a file that cannot be looked up."""
    if splits := _saved(folder):
        return splits, []
    splits, unread = _described(folder)
    return (splits, unread) if splits else _by_names(folder)


def _saved(folder: Path) -> Splits:
    """Files of what `datasets` has saved: one split, or some, each in a folder of its own."""
    index = folder / "dataset_dict.json"
    if splits := _object(index).get("splits"):
        if not isinstance(splits, list):
            raise ConfigError(
                f"{index}: splits: found {str(splits)[:80]!r}, allowed: a list of names"
            )
        return {str(name): _state_files(_inside(folder, name, index)) for name in splits}
    return {"train": _state_files(folder)} if (folder / "state.json").is_file() else {}


def _state_files(folder: Path) -> list[Path]:
    state = folder / "state.json"
    try:
        names = [file["filename"] for file in _object(state)["_data_files"]]
    except (KeyError, TypeError):
        names = []
    paths = [_inside(folder, name, state) for name in names]
    if not paths or not all(path.is_file() for path in paths):
        raise ConfigError(f"{state}: names files that are not there; save the data set again")
    return paths


def _inside(folder: Path, name: Any, source: Path) -> Path:
    """Path of the file ``name`` in ``folder``, which the file ``source`` in it names. ConfigError:
    it leads out of the folder, maybe to a private file of the reader."""
    path = folder / str(name)
    if (
        Path(str(name)).is_absolute()
        or ".." in path.parts[len(folder.parts) :]
        or not _is_inside(path, folder)
    ):
        raise ConfigError(
            f"{source}: found {str(name)[:80]!r}, allowed: files inside of {folder}; correct it"
        )
    return path


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether ``path``, all links followed, lies in ``folder``, or in the blobs of the repository
    in the cache of the Hugging Face hub that the folder is a snapshot of."""
    roots = [folder]
    roots += [
        parent.parent / "blobs"
        for parent in folder.absolute().parents
        if parent.name == "snapshots"
    ]
    target = os.path.realpath(path)
    return any(Path(target).is_relative_to(os.path.realpath(root)) for root in roots)


def _check_link(path: Path, folder: Path) -> None:
    """ConfigError: ``path`` is a link of another user that leads out of ``folder`` to a file of a
    third user, such as a private one of the reader."""
    if not path.is_symlink() or _is_inside(path, folder):
        return
    owner = path.lstat().st_uid
    if owner not in (os.geteuid(), 0, path.stat().st_uid):
        raise ConfigError(
            f"{path}: a link of another user to {os.path.realpath(path)}; name that file itself"
        )


def _described(folder: Path) -> tuple[Splits, list[Path]]:
    """Files by the configurations in the README.md of a repository, those of others than the usual
    one by `CONFIGURATION/SPLIT`; and files that would not be read, see `_by_names`. ConfigError: it
    names files that are not there or that lie outside of the folder, or a split twice."""
    readme = folder / "README.md"
    listed = _front_matter(readme).get("configs")
    configurations = (
        [entry for entry in listed if isinstance(entry, Mapping)]
        if isinstance(listed, list)
        else []
    )
    all_splits: Splits = {}
    unread: list[Path] = []
    for entry in configurations:
        name = str(entry.get("config_name", "default"))
        usual = len(configurations) == 1 or name == "default" or entry.get("default") is True
        root = _inside(folder, entry.get("data_dir") or "", readme)
        splits = _named_files(folder, root, entry.get("data_files"))
        if not splits and "data_dir" in entry:
            splits, unread_files = _by_names(root)
            unread += unread_files
            if not splits:
                raise ConfigError(
                    f"{root}: found no rows in the data_dir of README.md; download the data set "
                    "again"
                )
        for split, paths in splits.items():
            all_splits[split if usual else f"{name}/{split}"] = paths
    return all_splits, unread


def _named_files(folder: Path, root: Path, data_files: Any) -> Splits:
    """Files of each split that ``data_files`` of the README.md of ``folder`` names in ``root``, a
    folder inside."""
    readme = folder / "README.md"
    splits: Splits = {}
    for split, patterns in _patterns(data_files):
        paths: dict[Path, None] = {}
        for pattern in patterns:
            matches = [path for path in sorted(_matching(root, pattern, readme)) if path.is_file()]
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


def _matching(root: Path, pattern: Any, source: Path) -> Iterator[Path]:
    """Paths below ``root`` that match a ``pattern`` of the file ``source``. ConfigError: the
    pattern is not valid, or leads out of ``root``."""
    try:
        if not isinstance(pattern, str) or ".." in Path(pattern).parts:
            raise ValueError("it leaves the folder")
        yield from root.glob(pattern)
    except (ValueError, NotImplementedError, RecursionError) as error:
        raise ConfigError(
            f"{source}: data_files: found {str(pattern)[:80]!r} ({error}), allowed: patterns of "
            f"files inside of {root}"
        ) from error


def _patterns(given: Any) -> Iterator[tuple[str, Sequence[str]]]:
    """Splits with the patterns of their files, in all forms that `data_files` has."""
    if isinstance(given, Mapping):
        given = [{"split": split, "path": patterns} for split, patterns in given.items()]
    entries = given if isinstance(given, list) else [given] if given else []
    texts = [entry for entry in entries if isinstance(entry, str)]
    for entry in [*entries, *([{"path": texts}] if texts else [])]:
        if isinstance(entry, Mapping) and (patterns := entry.get("path")):
            yield (
                str(entry.get("split", "train")),
                patterns if isinstance(patterns, list) else [patterns],
            )


def _by_names(folder: Path) -> tuple[Splits, list[Path]]:
    """Files by the splits in their names, or in those of their folders; `train` if no name has a
    split. And files that would not be read: those without a split beside those with one, and other
    formats."""
    splits: Splits = defaultdict(list)
    others = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = any(part.startswith((".", "__")) for part in inside.parts)
        if hidden or not path.is_file():
            continue
        if path.suffix in SUFFIXES:
            _check_link(path, folder)
            splits[_split_of(inside)].append(path)
        elif path.name.endswith(_OTHER_FORMATS) and path.name not in _ABOUT_SETS:
            others.append(path)
    unnamed = splits.pop("", [])
    if splits:
        return dict(splits), [*unnamed, *others]
    return ({"train": unnamed} if unnamed else {}), others


def _split_of(path: Path) -> str:
    """Split that the name of a file says, or those of its folders; empty: none does."""
    if shard := _SHARD.match(path.stem):
        return shard[1]
    words = [
        word
        for part in (*path.parent.parts, path.stem)
        for word in _BETWEEN_WORDS.split(part.lower())
    ]
    return next((split for word in words for split, known in _WORDS.items() if word in known), "")


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is none. ConfigError: it cannot be read."""
    return read_json_object(path, "save the data set again", is_optional=True)


def _front_matter(path: Path) -> dict[str, Any]:
    """Content of the YAML between the first two lines of dashes of a README.md; {}: there is
    none."""
    try:
        text = read_regular(path, _README_BYTES).decode().replace("\r\n", "\n")
        found = yaml.safe_load(text.split("---\n", 2)[1]) if text.startswith("---\n") else {}
    except (OSError, ValueError, LookupError, RecursionError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
