"""Programs in a jail: what they may do, what they may not, and what happens if their processes are
killed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from relax_hpc.base.errors import ConfigError, RelaxError
from relax_hpc.base.reward_settings import CodeSettings, RewardSettings
from relax_hpc.cluster.sandbox.processes import command_line
from relax_hpc.rewards import RewardInput, jail, jail_cgroup, jail_entry
from relax_hpc.rewards.code import Code
from relax_hpc.rewards.jail import Jail
from relax_hpc.rewards.jail_interpreter import find_interpreter
from tests.guardian import MEMORY, memory_prefix, session_folder
from tests.plain_user import plain_user
from tests.rewards.hostile_programs import ARCHITECTURE, PROGRAMS, SETTINGS

# Root's programs get their namespaces, users and limits of memory in other ways.
pytestmark = pytest.mark.root

WITHOUT_RIGHTS = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
"""Root who may nothing, as in many containers: there are no namespaces."""


@pytest.fixture(
    scope="module", params=["ourselves", "a plain user"] if os.getuid() == 0 else ["ourselves"]
)
def ran(request: pytest.FixtureRequest) -> Iterator[dict[str, dict]]:
    """Result of each program, for each user that starts them."""
    command = "-m", "tests.rewards.hostile_programs"
    if request.param == "ourselves":
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=300, umask=0o077
        )
    else:
        with plain_user() as user:
            done = user.run(user.python, *command, timeout=300)
    assert done.returncode == 0, done.stderr
    results = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert results.keys() == {*PROGRAMS, "packages", "left"}
    yield results


def test_what_never_ends_is_ended_with_all_that_it_has_started(ran: dict) -> None:
    assert not any(ran[name]["in_time"] for name in ("endless", "sleeps", "stops"))
    assert ran["leaves a daemon"]["in_time"] and ran["left"]["programs"] == []


def test_processes_memory_and_files_have_their_limits(ran: dict) -> None:
    # The program itself is one of them; the processes that run it are none.
    assert ran["forks"]["output"] == ran["threads"]["output"] == f"{SETTINGS.processes - 1}\n"
    for name in ("memory", "shared memory", "fills its input"):
        assert ran[name]["code"] == 1 and ran[name]["output"] == ""
    assert ran["one file"]["code"] != 0 and "written" not in ran["one file"]["output"]
    assert 0 < int(ran["many files"]["output"]) <= SETTINGS.disk_mb
    assert 0 < int(ran["inodes"]["output"]) < 4096
    assert ran["prints"]["code"] != 0 and ran["prints"]["in_time"]


def test_the_processes_of_a_program_have_one_limit_of_memory_together(ran: dict) -> None:
    for name in ("children", "orphans", "sockets"):
        result = ran[f"little memory: {name}"]
        assert (result["code"], result["in_time"]) == (128 + signal.SIGKILL, True), name
    # Of pages that processes share each has its part.
    assert ran["little memory: shared"]["output"] == "0 0 0 0\n"


def test_there_is_no_network_and_nobody_elses_file_or_process(ran: dict) -> None:
    assert ran["network"]["output"] == "False\nNetwork is unreachable\n"
    folders, *refused = ran["looks around"]["output"].splitlines()
    # The interpreter may lie in a home directory. Nothing else of that is shown, see below.
    shown = {Path(path).parts[1] for path in find_interpreter("", "").parts}
    assert not {"home", "root", "proc", "sys", "var", "run"}.difference(shown).intersection(
        folders.split("'")
    )
    assert refused == ["30", "30"] and "['main.py']" in folders
    assert ran["environment"]["output"] == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH'] 6\n"
    assert ran["kills"]["output"] == "alone\n"
    assert ran["becomes root"]["output"] == "True -1 False\n"
    assert ran["changes devices"]["output"].split() == ["PermissionError"] * 3 + ["ValueError"]


def test_calls_that_no_limit_counts_or_that_no_namespace_holds_are_refused(ran: dict) -> None:
    refused, unknown, namespaces = ran["calls"]["output"].splitlines()
    assert refused.split() == ["ENOSYS"] * len(ARCHITECTURE.refused)
    assert unknown.split() == ["ENOSYS"] * 3 and namespaces.split() == ["EPERM"] * 4
    families = {line.rpartition(" ")[0] or line for line in ran["sockets"]["output"].splitlines()}
    assert families == {"1", "2", "10"}


def test_a_program_cannot_disturb_the_processes_that_run_it(ran: dict) -> None:
    assert ran["kills its group"]["code"] == 128 + signal.SIGKILL
    assert ran["interrupts init"] == {
        "name": "interrupts init",
        "code": 0,
        "output": "running\n",
        "in_time": True,
    }


def test_usual_programs_work(ran: dict) -> None:
    outputs = {
        name: ran[name]["output"].split()
        for name in ("speaks", "multiprocessing", "numpy", "asyncio")
    }
    assert outputs == {
        "speaks": ["stressed"],
        "multiprocessing": ["1048576", "0", "1", "4", "9", "spawned"],
        "numpy": ["300"] if ran["packages"]["are_shown"] else [],
        "asyncio": ["child"],
    }


@pytest.mark.parametrize("kernel", ["--new-kernel", "--old-kernel"])
@pytest.mark.parametrize("user", ["ourselves", "a plain user"])
def test_mounts_below_the_system_are_hidden_and_keys_kept(user: str, kernel: str) -> None:
    with plain_user() as plain:
        command = [plain.python, "-m", "tests.rewards.mounts_and_keys", kernel]
        if user == "ourselves" and os.getuid() == 0:
            ended = subprocess.run(
                ["unshare", "-m", *command], capture_output=True, text=True, timeout=90
            )
        else:
            ids = f"--map-user={plain.entry.pw_uid}", f"--map-group={plain.entry.pw_gid}"
            ended = plain.run("unshare", "-Um", *ids, "--keep-caps", *command)
    assert ended.returncode == 0, ended.stderr
    answers = json.loads(ended.stdout)
    read_only = "Read-only file system"
    attempts = ["No such file or directory", "Permission denied", read_only, read_only, -1]
    assert answers["runs"] == [[prefix, *attempts] for prefix in answers["prefixes"]]
    assert answers["left"] == ["secret", "within"]


PREFIXES = {
    "a link in the home": "mkdir bin; ln -s {system} bin/python3",
    "an environment that is the home": "{system} -m venv --without-pip .",
    "an environment over linked folders": (
        "mkdir real; {system} -m venv --without-pip real/env; ln -s real/env env; mkdir bin; "
        "ln -s ../env/bin/python3 bin/python3"
    ),
    "a script": "mkdir bin; printf '#!/bin/sh\\nexec {system} \"$@\"\\n' > bin/python3; chmod +x "
    "bin/python3",
}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_an_interpreter_in_a_home_shows_nothing_else_of_it(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["sh", "-ec", PREFIXES[prefix].format(system=Path(sys.executable).resolve())]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id").write_text("PRIVATE-KEY")
    (tmp_path / "notes").write_text("PRIVATE")
    (tmp_path / "lib").mkdir(exist_ok=True)
    (tmp_path / "lib" / "notes").write_text("PRIVATE")
    monkeypatch.setenv("HOME", str(tmp_path))
    secrets = [str(tmp_path / name) for name in (".ssh", "notes", "lib/notes")]
    program = (
        f"import os, sys; print(sys.version_info[0], [path for path in {secrets} if "
        "os.path.exists(path)])"
    )
    python = str(tmp_path / "bin" / "python3")
    assert Jail(CodeSettings(python=python)).run(program, "", 60.0).output == "3 []\n"


def test_an_interpreter_that_does_not_start_is_named(tmp_path: Path) -> None:
    no_python = tmp_path / "python"
    no_python.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    no_python.chmod(0o755)
    with pytest.raises(
        ConfigError, match=r"reward\.code\.python: found '.*/python', which is no Python.*: broken"
    ):
        Jail(CodeSettings(python=str(no_python)))
    with pytest.raises(
        ConfigError, match=r"reward\.code\.python: found '/no/python', which is no program"
    ):
        Jail(CodeSettings(python="/no/python"))


def test_a_machine_without_a_filter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(
        ConfigError, match=r"reward\.code: found a machine of riscv64, allowed: x86_64, aarch64"
    ):
        Jail(CodeSettings())
    assert Jail(CodeSettings(weak=True)).run("print(6 * 7)", "", 60.0).output == "42\n"


def test_where_nothing_can_be_kept_apart_it_is_refused_unless_asked_for(tmp_path: Path) -> None:
    tools = {"kind": "tools", "options": {"tools": {"python": {}}}}
    configs = {
        "both": {"environment": tools, "rollout": {"reward": "code"}},
        "weak": {
            "environment": {"kind": "tools", "options": {"tools": {"python": {"weak": True}}}}
        },
        "on other machines": {"environment": tools, "layout": "jobs"},
    }
    for name, settings in configs.items():
        (tmp_path / name).write_text(json.dumps(settings))
    program = """if True:
        import json, sys
        from relax_hpc.ops.checks.settings import check
        from relax_hpc.config.load import load
        from relax_hpc.base.reward_settings import CodeSettings
        from relax_hpc.rewards.jail import Jail
        findings = {path: check(load([path])) for path in sys.argv[1:]}
        print(json.dumps([Jail(CodeSettings(weak=True)).run("print(6 * 7)", "", 60).output, findings]))
    """
    command = [
        *([] if os.getuid() == 0 else ["unshare", "-Ur"]),
        *WITHOUT_RIGHTS,
        sys.executable,
        "-c",
        program,
    ]
    ended = subprocess.run(
        [*command, *configs], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    output, findings = json.loads(ended.stdout)
    assert output == "42\n"
    apart = {
        name: [line for line in lines if "isolated" in line] for name, lines in findings.items()
    }
    reason = (
        f"no program can be isolated on {os.uname().nodename}: Operation not permitted: unshare; "
        "the site has to "
        "allow user namespaces (kernel.unprivileged_userns_clone, user.max_user_namespaces)"
    )
    keys = ("reward.code", "environment.options.tools.python")
    both = [f"{key}: {reason}, or set {key}.image, or {key}.weak: true" for key in keys]
    assert apart == {"both": both, "weak": [], "on other machines": []}


@pytest.mark.parametrize("below", [session_folder(), MEMORY], ids=["/tmp", "/dev/shm"])
def test_an_interpreter_may_lie_where_programs_have_folders_of_their_own(below: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=memory_prefix(), dir=below) as folder:
        Path(folder).chmod(0o755)
        venv.create(folder, symlinks=True)
        code_settings = dataclasses.replace(SETTINGS, python=f"{folder}/bin/python")
        prints = (
            "import sys; open('/tmp/a', 'w').close(); print(sys.prefix, open('/dev/null').read())"
        )
        assert Jail(code_settings).run(prints, "", 60.0).output.split() == [folder]


class Killer:
    """Kills processes of programs, from outside of their jails, while a test waits for them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, deaths: int, depth: int, number: int = 0
    ) -> None:
        """``deaths``: times that it kills; ``depth``: which process below this one, see
        `jail_entry`; ``number``: of the programs that run, the last one is 0."""
        self.deaths, self.kills = deaths, 0
        real = jail._Started.wait

        def wait(started: jail._Started, timeout_s: float) -> int | None:
            if self.kills < self.deaths:
                self.kills += 1
                victim = psutil.Process(started._process.pid)
                if number:
                    victim = self.first(lambda: self.jails_except(started._process.pid))
                for _ in range(depth):
                    victim = self.first(victim.children)
                victim.kill()
            return real(started, timeout_s)

        monkeypatch.setattr(jail._Started, "wait", wait)

    @staticmethod
    def jails_except(pid: int) -> list[psutil.Process]:
        """Other outer processes of jails. Pytest may have further children, such as the guardian of
        the session."""
        return [
            child
            for child in psutil.Process().children()
            if jail_entry.__file__ in command_line(child) and child.pid != pid
        ]

    @staticmethod
    def first(find: Callable[[], list[psutil.Process]]) -> psutil.Process:
        """The first process that ``find`` returns. A process that starts or creates its namespaces
        may be missing, or may hide its command line, for a moment."""
        deadline = time.monotonic() + 60.0
        processes = find()
        while not processes:
            assert time.monotonic() < deadline
            time.sleep(0.005)
            processes = find()
        return processes[0]


@pytest.mark.parametrize(("process", "depth"), [("the outer one", 0), ("init", 1)])
def test_a_program_that_is_killed_from_outside_runs_again(
    process: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program_jail = Jail(SETTINGS)
    monkeypatch.setattr(jail, "_PAUSE_S", 0.0)
    killer = Killer(monkeypatch, deaths=2, depth=depth)
    assert (
        program_jail.run("print(input())", "read again", 60.0).output == "read again\n"
        and killer.kills == 2
    )
    killer.kills, killer.deaths = 0, 3
    with pytest.raises(OSError, match="killed from outside of its jail, by SIGKILL"):
        program_jail.run("print(input())", "read again", 60.0)
    assert killer.kills == 3


@pytest.mark.parametrize(
    ("process", "depth", "number"), [("the tests", 2, 0), ("the program's init", 1, 1)]
)
def test_tests_whose_process_is_killed_run_again(
    process: str, depth: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = Code(RewardSettings(code=CodeSettings(timeout_s=60.0)))
    monkeypatch.setattr(jail, "_PAUSE_S", 0.0)
    killer = Killer(monkeypatch, deaths=2, depth=depth, number=number)
    sample = RewardInput(
        "?",
        "",
        "```python\ndef add(a, b): return a + b\n```",
        "stop",
        {"tests": "assert add(1, 2) == 3"},
    )
    assert code(sample)["total"] == 1.0 and killer.kills == 2
    killer.kills, killer.deaths = 0, 3
    with pytest.raises(OSError, match="killed"):
        code(sample)


def test_a_shortage_of_the_moment_is_no_wrong_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jail, "_PAUSE_S", 0.0)
    with monkeypatch.context() as patch:
        Killer(patch, deaths=3, depth=0)
        with pytest.raises(RelaxError, match=r"no program could be run on .*SIGKILL") as failure:
            Jail(SETTINGS)
    assert failure.type is RelaxError
    for number, kind in ((errno.EAGAIN, RelaxError), (errno.EPERM, ConfigError)):

        def fail(*_: object, number: int = number) -> None:
            raise jail.NotStarted(number, os.strerror(number))

        monkeypatch.setattr(Jail, "_start", fail)
        with pytest.raises(RelaxError, match=os.strerror(number)) as failure:
            Jail(SETTINGS)
        assert failure.type is kind


def test_a_program_that_kills_itself_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program_jail, starts = Jail(SETTINGS), list[str]()
    real = Jail._start
    monkeypatch.setattr(
        Jail, "_start", lambda self, *arguments: starts.append("") or real(self, *arguments)
    )
    for victim in ("os.getpid()", "0"):
        ran = program_jail.run(f"import os, signal; os.kill({victim}, signal.SIGKILL)", "", 60.0)
        assert ran.code == 128 + signal.SIGKILL
    assert len(starts) == 2


def test_threads_of_a_user_are_counted_where_the_kernel_counts_them_too() -> None:
    before = jail_entry.count_threads(os.getuid())
    with subprocess.Popen(["sleep", "60"]) as child:
        assert before > 0 and jail_entry.count_threads(os.getuid()) > 0
        assert jail_entry.count_threads(1 << 31) == 0
        child.kill()


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    """Folders like those of a cgroup v2 tree, of which `user` is delegated."""
    for name, controllers in (
        ("user", "cpu memory pids"),
        ("user/own", ""),
        ("system", "cpu"),
        ("system/own", ""),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.subtree_control").write_text(controllers)
        (tmp_path / name / "cgroup.procs").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("lines", "parent"),
    [
        ("0::/user/own", "user"),
        ("4:memory:/x\n0::/user/own", "user"),
        ("0::/system/own", None),
        ("0::/user/gone/own", None),
        ("0::/user", None),
        ("0::/../user/own", None),
        ("0::/", None),
        ("4:memory:/user/own", None),
        ("", None),
    ],
)
def test_a_group_is_made_where_the_memory_controller_is_delegated(
    lines: str, parent: str | None, cgroups: Path, tmp_path: Path
) -> None:
    (tmp_path / "self").write_text(lines)
    expected = cgroups / parent if parent else None
    assert jail_cgroup.delegated_parent(cgroups, tmp_path / "self") == expected


def test_a_group_limits_the_memory_of_all_processes_together(
    cgroups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jail_cgroup, "delegated_parent", lambda: cgroups / "user")
    monkeypatch.setattr(jail_cgroup, "_REMOVE_S", 0.0)
    real, groups = os.open, list[Path]()

    def open_group(path: Path, flags: int) -> int:
        groups.append(Path(path).parent)
        return real(path, flags | os.O_CREAT)

    monkeypatch.setattr(os, "open", open_group)
    with jail_cgroup.limited_group(640, 8) as descriptor:
        # The kernel takes this for the process that writes it.
        os.write(descriptor, b"0")
        limits = {path.name: path.read_text() for path in groups[0].iterdir()}
    assert limits == {
        "memory.max": str(640 << 20),
        "memory.oom.group": "1",
        "memory.swap.max": "0",
        "pids.max": "8",
        "cgroup.procs": "0",
    }
    # Processes in other sessions end with the group.
    assert (groups[0] / "cgroup.kill").read_text() == "1"
    monkeypatch.setattr(jail_cgroup, "delegated_parent", lambda: cgroups / "gone")
    with jail_cgroup.limited_group(640, 8) as descriptor:
        assert descriptor == -1


@pytest.mark.parametrize("weak", [False, True])
def test_each_program_joins_its_group(
    weak: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program_jail = Jail(dataclasses.replace(SETTINGS, weak=weak))
    processes = tmp_path / "cgroup.procs"

    @contextlib.contextmanager
    def group(memory_mb: int, processes_limit: int) -> Iterator[int]:
        with processes.open("wb") as file:
            yield file.fileno()

    monkeypatch.setattr(jail, "limited_group", group)
    assert program_jail.run("print(6 * 7)", "", 60.0).output == "42\n"
    assert processes.read_text() == "0"
