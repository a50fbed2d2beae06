"""Batch scripts: golden files, shipped sizes, and values that stay values whatever they hold."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from relax_hpc.base.errors import EXIT_CONFIG, ConfigError
from relax_hpc.cluster.slurm.layout import components, gpu_hours
from relax_hpc.cluster.slurm.render import directive, render, render_group, templates
from relax_hpc.config import Config, load, resolve
from relax_hpc.config.yaml_files import dump_yaml, parse_yaml
from relax_hpc.ops.checks.settings import check
from tests.effort import effort
from tests.helpers.model_files import model_directory
from tests.requirements import requires

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
SIZES = sorted(
    (ROOT / "configs" / "clusters").glob("*-nodes*.yaml"),
    key=lambda path: (len(path.stem), path.stem),
)
SITES = sorted((ROOT / "configs" / "sites").glob("*.yaml"))
UPDATE = os.environ.get("RELAX_UPDATE_GOLDEN") == "1"
"""Write the golden files anew instead of comparing; read the difference before it is committed."""


def nodes_of(size: Path) -> int:
    return int(size.stem.split("-")[0])


def gpus_of(size: Path) -> int:
    """Of each node: 8, unless the name says otherwise."""
    return int(size.stem.partition("-of-")[2] or 8)


CASES = [(size, layout, None) for size in SIZES for layout in ("het", "jobs", "local")]
CASES = [case for case in CASES if (case[1] == "local") == (nodes_of(case[0]) == 1)]
CASES += [(ROOT / "configs/clusters/8-nodes.yaml", "het", site) for site in SITES]

FAKE_PYTHON = r"""#!/bin/bash
{ printf '%s\0' "$PWD" "$#" "$@"; env -0; } >"$FAKE_OUT"
"""


def compose(size: Path, layout: str, site: Path | None = None, **overrides: Any) -> Config:
    values = {
        "name": "demo",
        "run_dir": "/scratch/demo",
        "layout": layout,
        "site.python": "/opt/relax/bin/python",
    }
    return load([size, *([site] if site else [])], values | overrides)


def one(text: dict[str, str]) -> str:
    return "\n".join(f"==> {name} <==\n{script}" for name, script in text.items())


@cache
def rendered(size: Path, layout: str, site: Path | None) -> dict[str, str]:
    return render(compose(size, layout, site))


@pytest.mark.parametrize(
    ("size", "layout", "site"),
    CASES,
    ids=lambda v: v.stem if isinstance(v, Path) else str(v or "any"),
)
def test_golden(size: Path, layout: str, site: Path | None) -> None:
    path = GOLDEN / f"{'-'.join([size.stem, layout, *([site.stem] if site else [])])}.txt"
    text = one(rendered(size, layout, site))
    if UPDATE:
        path.write_text(text)
    assert path.read_text() == text, (
        "meant so? then RELAX_UPDATE_GOLDEN=1 pytest tests/cluster/test_render.py"
    )


def test_no_golden_file_is_left_over() -> None:
    names = {
        "-".join([size.stem, layout, *([site.stem] if site else [])])
        for size, layout, site in CASES
    }
    assert {path.stem for path in GOLDEN.glob("*.txt")} == names


def test_shipped_files_are_what_the_tool_writes() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "render_templates.py", "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, ""), "run python tools/render_templates.py"
    assert {path.stem for path in (ROOT / "slurm").glob("*.sbatch")} == {
        path.stem for path in SIZES
    }


def test_templates_are_short() -> None:
    files = list(templates().glob("*.j2"))
    assert files and all(len(file.read_text().splitlines()) <= 60 for file in files)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("scripts")
    found = sorted((ROOT / "slurm").glob("*.sbatch"))
    for number, case in enumerate(CASES):
        for name, text in rendered(*case).items():
            path = folder / f"{number}-{name}"
            path.write_text(text)
            found.append(path)
    return found


def test_every_script_is_valid_bash(scripts: list[Path]) -> None:
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True, timeout=10)


def test_shellcheck_finds_nothing(scripts: list[Path]) -> None:
    requires("shellcheck")
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")


SHAPE = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
}
EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 8,
    "tie_word_embeddings": False,
}
EXPERTS |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}


@pytest.fixture
def model(size: Path, tmp_path: Path) -> Path:
    """What `check` reads of a model with the layers and heads of an 8B one, or with experts where
    ``size`` is for those."""
    path = model_directory(
        tmp_path / "model", **SHAPE, **(EXPERTS if size.stem.endswith("-moe") else {})
    )
    (path / "train.jsonl").write_text('{"id": 1, "prompt": "12", "answer": "12"}\n')
    return path


@pytest.mark.parametrize("size", SIZES, ids=lambda path: path.stem)
def test_a_size_takes_the_nodes_of_its_name_and_a_run_on_it_has_no_findings(
    size: Path, model: Path
) -> None:
    # A site, so that one node is a job's and not this machine.
    run = {
        "run_dir": str(model / "run"),
        "model.path": str(model),
        "data.train": str(model / "train.jsonl"),
    }
    run |= {"site.name": "cluster", "rollout.reward": "math"}
    config = resolve(load([size], run))
    assert check(config) == []
    nodes, gpus = nodes_of(size), gpus_of(size)
    with_gpus = [part for part in components(config) if part.gpus_per_node]
    assert sum(part.nodes for part in with_gpus) == nodes
    assert gpu_hours(config) == nodes * gpus * 24
    assert all(part.memory for part in components(config)), "else the site's default rules"
    tp = config.rollout.engine.flags.get("tp_size", 1)
    (rollout,) = (group.resources for group in config.groups.values() if "rollout" in group.roles)
    assert config.rollout.replicas * tp == rollout.nodes * rollout.gpus_per_node
    assert all(part.tasks_per_node * part.cpus_per_task <= 8 * gpus for part in components(config))


@pytest.mark.parametrize("size", SIZES, ids=lambda path: path.stem)
def test_a_size_has_a_place_for_the_reference_of_a_kl(size: Path, model: Path) -> None:
    """As the comment in its file says."""
    (said,) = (
        line
        for line in size.read_text().splitlines()
        if line.startswith("# With a KL in the loss: ")
    )
    # A site, so that one node is a job's and not this machine.
    run = {
        "run_dir": str(model / "run"),
        "model.path": str(model),
        "data.train": str(model / "train.jsonl"),
    }
    run |= {"site.name": "cluster", "rollout.reward": "math"}
    layer = parse_yaml(said.partition("loss: ")[2], "comment") | {
        "algorithm": {"kl": {"coefficient": 0.1}}
    }
    with_kl = model / f"{size.stem}.yaml"
    with_kl.write_text(dump_yaml(layer))
    config = resolve(load([size, with_kl], run))
    assert check(config) == []
    assert gpu_hours(config) == nodes_of(size) * gpus_of(size) * 24
    assert all(
        part.tasks_per_node * part.cpus_per_task <= 8 * gpus_of(size) for part in components(config)
    )


@pytest.mark.parametrize("site", SITES, ids=lambda path: path.stem)
def test_example_sites_go_with_every_size_and_say_that_nobody_has_tried_them(site: Path) -> None:
    text = site.read_text()
    assert "UNTESTED" in text and "placeholder" in text
    for size in SIZES:
        config = compose(size, "local" if nodes_of(size) == 1 else "jobs", site)
        assert all(group.roles for group in config.groups.values()), (
            "a site must not bring back a group"
        )
        assert render(config)


# -- what the text says ----------------------------------------------------------------------------


FOUR = ROOT / "configs/clusters/4-nodes.yaml"


def lines(text: str, option: str) -> list[str]:
    return [
        line.removeprefix("#SBATCH ")
        for line in text.splitlines()
        if line.startswith(f"#SBATCH --{option}")
    ]


def test_het_components_are_neither_killed_nor_requeued_and_jobs_are_requeued() -> None:
    het = render(compose(FOUR, "het"))["run.sbatch"]
    assert het.count("#SBATCH hetjob\n") == 2
    assert len(lines(het, "no-kill")) == len(lines(het, "no-requeue")) == 3
    assert lines(het, "requeue") == []
    assert lines(het, "signal") == ["--signal=B:USR2@300"], (
        "once: Slurm signals the batch script alone"
    )
    jobs = render(compose(FOUR, "jobs"))
    assert list(jobs) == ["hub.sbatch", "rollout.sbatch", "actor.sbatch"]
    for group, text in ((name.removesuffix(".sbatch"), text) for name, text in jobs.items()):
        assert (len(lines(text, "requeue")), lines(text, "no-")) == (1, [])
        assert text.endswith(f"relax_hpc.commands.head --run_dir /scratch/demo --group {group}\n")


def test_a_hub_of_two_nodes_outlives_one_of_them_in_each_layout() -> None:
    jobs = render(
        compose(
            FOUR, "jobs", **{"groups.hub.resources.nodes": 2, "groups.actor.resources.nodes": 2}
        )
    )
    assert [name for name, text in jobs.items() if lines(text, "no-kill")] == ["hub.sbatch"]
    assert all(lines(text, "requeue") for text in jobs.values())


def test_a_group_of_a_het_run_in_a_job_of_its_own_comes_back_by_itself() -> None:
    text = render_group(compose(FOUR, "het"), "rollout-2")
    assert (lines(text, "requeue"), lines(text, "no-kill")) == (["--requeue"], [])
    assert lines(text, "nodes") == ["--nodes=3"] and "hetjob" not in text
    assert lines(text, "job-name") == ["--job-name=rollout-2-demo"]
    assert text.endswith("--run_dir /scratch/demo --group rollout-2\n")


def test_gpus_are_asked_for_as_the_site_wants() -> None:
    def asked(request: str, kind: str, options: dict[str, str]) -> list[str]:
        config = compose(FOUR, "jobs", **{"site.gpu_request": request, "site.gpu_type": kind})
        config.groups["actor"].resources.options = options
        text = render_group(config, "actor")
        return lines(text, "gpus") + lines(text, "gres")

    assert asked("gpus_per_node", "", {}) == ["--gpus-per-node=8"]
    assert asked("gpus_per_node", "h100", {"gres": "tmp:1"}) == [
        "--gpus-per-node=h100:8",
        "--gres=tmp:1",
    ]
    assert asked("gres", "", {}) == ["--gres=gpu:8"]
    assert asked("gres", "a100", {"gres": "tmp:1"}) == ["--gres=gpu:a100:8,tmp:1"]
    assert asked("none", "a100", {}) == []


def test_flags_memory_and_other_options() -> None:
    config = compose(
        FOUR, "jobs", **{"site.options": {"mem": "0", "exclusive": "", "mail-user": "me@there"}}
    )
    config.groups["actor"].resources.memory = "64G"
    config.groups["actor"].resources.options = {"exclude": "node[1-2],x3", "mail-type": "END"}
    text = render_group(config, "actor")
    for line in (
        "--mem=64G",
        "--exclusive",
        "--mail-user=me@there",
        "--exclude=node[1-2],x3",
        "--mail-type=END",
    ):
        assert f"#SBATCH {line}\n" in text
    config.groups["rollout"].resources.memory = ""
    config.site.options |= {"mem-per-gpu": "9G"}
    asked = {
        group: lines(render_group(config, group), "mem") for group in ("actor", "hub", "rollout")
    }
    assert asked == {
        "actor": ["--mem=64G"],
        "hub": ["--mem=16G"],
        "rollout": ["--mem=0", "--mem-per-gpu=9G"],
    }
    config.site.memory_request = "none"
    assert lines(render_group(config, "hub"), "mem=") == ["--mem=0"], (
        "what the site's options ask for is the site's"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"run_dir": "runs/demo"},
            "run_dir: found 'runs/demo', allowed in a batch script: an absolute path",
        ),
        ({"run_dir": "/a%j"}, r"run_dir: found '/a%j', allowed: no % and no"),
        ({"run_dir": "/a\n#SBATCH --nodes=99"}, "run_dir: .*no line breaks or control characters"),
        ({"name": "a\nb"}, "name: .*no line breaks"),
        ({"site.partition": "a\rb"}, "partition: .*no line breaks"),
        (
            {"site.options": {"--qos": "a"}},
            "site.options: found '--qos': 'a', allowed: the long name",
        ),
        ({"site.options": {"no-requeue": ""}}, "site.options.no-requeue: .*set layout instead"),
        ({"site.options": {"array": "1-3"}}, "site.options.array: .*it cannot be changed"),
        ({"site.env": {"A=1;B": "x"}}, "site.env: found 'A=1;B', allowed: names of letters"),
        (
            {"groups": {"actor": {"resources": {"memory": "all"}}}},
            "groups.actor.resources.memory: found 'all'",
        ),
    ],
)
def test_what_cannot_be_written_is_an_error_that_teaches(
    overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        render(compose(FOUR, "het", **overrides))


MANY = {
    "run_dir": "/a%j",
    "name": "a\nb",
    "site.options": {"--qos": "a", "no-requeue": "", "chdir": "/"},
    "site.srun_options": {"mpi": "none", "-x": "1"},
    "site.env": {"A=1": "x", "B;": "x"},
    "site.container": {"runtime": "apptainer", "mounts": ["a", "b,c"]},
    "site.mpi.launcher": "pmix",
    "data.train": "/a:b/train.jsonl",
    "groups": {
        "actor": {"resources": {"memory": "all"}},
        "rollout": {"resources": {"memory": "2 G"}},
    },
}


@pytest.mark.parametrize("layout", ["het", "jobs"])
def test_all_that_cannot_be_written_is_told_at_once(layout: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render(compose(FOUR, layout, **MANY))
    keys = sorted(mistake.partition(": ")[0] for mistake in caught.value.mistakes)
    assert keys == [
        "groups.actor.resources.memory", "groups.rollout.resources.memory", "name",
        "run_dir", "site.container.image",
        "site.container.mounts", "site.container.mounts", "site.container.runtime", "site.env", "site.env",
        "site.mpi.launcher", "site.options", "site.options.chdir", "site.options.no-requeue", "site.srun_options", "site.srun_options.mpi",
    ]  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"site\.container\.image: found nothing with runtime pyxis"
    ):
        render(compose(FOUR, layout, **{"site.container.runtime": "pyxis"}))


@pytest.mark.parametrize("layout", ["het", "jobs", "local"])
def test_all_for_which_a_layout_cannot_be_had_is_told_at_once(layout: str) -> None:
    own = {"time": "soon"} if layout == "jobs" else {}
    groups = {
        "actor": {"resources": {"nodes": 3, **own}},
        "rollout": {"env": {"CUDA_VISIBLE_DEVICES": "0"}},
    }
    with pytest.raises(ConfigError) as caught:
        render(
            compose(
                FOUR,
                layout,
                groups=groups,
                **{"rollout.replicas": 7, "slurm.time": "5", "slurm.signal_s": 300},
            )
        )
    keys = [mistake.partition(": ")[0] for mistake in caught.value.mistakes]
    wanted = {"slurm.signal_s"} | ({"groups.actor.resources.time"} if layout == "jobs" else set())
    nodes = {f"groups.{name}.resources.nodes" for name in ("rollout", "actor")}
    uneven = {
        "rollout.replicas",
        "groups.actor.resources.nodes",
        "groups.rollout.env.CUDA_VISIBLE_DEVICES",
    }
    assert {*keys} >= wanted | (nodes if layout == "local" else uneven), keys


# -- hostile values --------------------------------------------------------------------------------


class Ran:
    """What the fake interpreter of a batch script was given."""

    def __init__(self, path: Path) -> None:
        words = path.read_bytes().decode("utf-8", "surrogateescape").split("\0")
        count = int(words[1])
        self.cwd, self.argv, rest = words[0], words[2 : 2 + count], words[2 + count : -1]
        self.env = dict(entry.split("=", 1) for entry in rest)


def run_script(folder: Path, text: str, **env: str) -> Ran:
    script, out = folder / "script", folder / "out"
    script.write_text(text)
    out.unlink(missing_ok=True)
    variables = {"PATH": os.environ["PATH"], "USER": "me", "FAKE_OUT": str(out), **env}
    done = subprocess.run(
        ["bash", script], env=variables, cwd=folder, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return Ran(out)


def fake_python(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FAKE_PYTHON)
    path.chmod(0o755)
    return path


HOSTILE = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), max_size=30
) | st.sampled_from(
    [
        "$(touch pwned)",
        "`touch pwned`",
        "a b",
        "'",
        '"',
        "\\",
        "a'; touch pwned; '",
        "$HOME",
        "*",
        "{{ 1 }}",
        "-x",
        "\n",
    ]
)


@settings(max_examples=effort(10, 100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=HOSTILE, folder=HOSTILE)
@example(value="x'\"$(touch pwned)\n`touch pwned`", folder="run $(touch pwned)'\"")
def test_hostile_values_stay_values(tmp_path: Path, value: str, folder: str) -> None:
    run_dir = "/scratch/r" + "".join(c for c in folder if c.isprintable() and c not in "%\\")
    python = fake_python(tmp_path / "it's $(touch pwned) `x`" / "python")
    config = compose(
        FOUR, "jobs", run_dir=run_dir, **{"site.python": str(python), "site.env": {"VALUE": value}}
    )
    config.site.local_dir = "/local/" + folder
    config.site.modules = [value, "b c"]
    (tmp_path / "modules").unlink(missing_ok=True)
    ran = run_script(
        tmp_path, render_group(config, "actor"), **module('printf "%s|" "$@" >modules')
    )
    assert ran.argv == ["-m", "relax_hpc.commands.head", "--run_dir", run_dir, "--group", "actor"]
    assert ran.env["VALUE"] == value
    assert ran.env["RELAX_LOCAL_DIR"] == f"/local/{folder}/me-relax"
    assert ran.env["PYTHONPATH"] == str(Path(run_dir) / "code")
    assert (tmp_path / "modules").read_bytes().decode() == f"load|{value}|b c|"
    assert not list(tmp_path.rglob("pwned"))


def module(body: str) -> dict[str, str]:
    """A shell function `module` as bash hands functions on: in the environment."""
    return {"BASH_FUNC_module%%": f"() {{ {body}; }}"}


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_directives_are_one_word_as_sbatch_reads_them(value: str) -> None:
    if not value.isprintable():
        with pytest.raises(ConfigError, match="no line breaks"):
            directive("comment", value)
    elif value:
        assert sbatch_word(directive("comment", value)) == f"--comment={value}"


def sbatch_word(line: str) -> str:
    """The first word of a line, read as sbatch 22.05 was seen to: quotes group, a backslash takes
    what follows."""
    word, quote, position = "", "", 0
    while position < len(line):
        character = line[position]
        if character == "\\":
            position += 1
            word += line[position]
        elif quote or character in "\"'":
            if character == quote or not quote:
                quote = "" if quote else character
            else:
                word += character
        elif character.isspace() or character == "#":
            break
        else:
            word += character
        position += 1
    assert not quote and position == len(line), "nothing may be left of the line"
    return word


def test_a_size_by_hand_takes_its_files_from_the_environment(tmp_path: Path) -> None:
    python = str(fake_python(tmp_path / "my python"))
    text = (ROOT / "slurm" / "4-nodes.sbatch").read_text()
    files = {
        "RELAX_CONFIG": "a b.yaml:$(touch pwned).yaml",
        "RELAX_SITE": "my site.yaml",
        "RELAX_PYTHON": python,
    }
    ran = run_script(tmp_path, text, **files)
    size = f"--config={tmp_path}/configs/clusters/4-nodes.yaml"
    names = ["--config=a b.yaml", "--config=$(touch pwned).yaml", size]
    assert ran.argv == ["-m", "relax_hpc.commands.head", *names, "--config=my site.yaml"]
    del files["RELAX_SITE"]
    assert (
        run_script(tmp_path, text, **files, RELAX_HOME="/repo").argv[-1]
        == "--config=/repo" + size.split(str(tmp_path))[1]
    )
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("site", SITES, ids=lambda path: path.stem)
def test_sizes_by_hand_are_written_for_a_site(tmp_path: Path, site: Path) -> None:
    tool = [
        sys.executable,
        ROOT / "tools" / "render_templates.py",
        "--site",
        site,
        "--folder",
        tmp_path / "mine",
    ]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=60, check=True)
    text = (tmp_path / "mine" / "4-nodes.sbatch").read_text()
    config = load([FOUR, site])
    assert text.count("#SBATCH hetjob") == len(components(config)) - 1
    for part in components(config):
        assert all(f"#SBATCH --{name}={value}\n" in text for name, value in part.options.items())
    out = tmp_path / "out"
    python = str(fake_python(tmp_path / "python"))
    ran = run_script(
        tmp_path,
        text,
        RELAX_CONFIG="run.yaml",
        RELAX_PYTHON=python,
        FAKE_OUT=str(out),
        **module("true"),
    )
    assert ran.argv[-1] == f"--config={site}" and ran.argv[-2].endswith(
        "configs/clusters/4-nodes.yaml"
    )
    if not config.site.cpu_nodes:
        assert "left out: 2-nodes: groups." in done.stderr, "a hub of one node"
    again = subprocess.run([*tool, "--check"], capture_output=True, text=True, timeout=60)
    assert (again.returncode, again.stdout) == (0, "")


def test_a_size_by_hand_says_what_it_lacks(tmp_path: Path) -> None:
    script = ROOT / "slurm" / "1-nodes.sbatch"
    done = subprocess.run(
        ["bash", script],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=10,
    )
    assert done.returncode != 0 and "RELAX_CONFIG: name the files of the run" in done.stderr


def test_libraries_cache_on_the_nodes_own_disk_unless_the_site_says_otherwise(
    tmp_path: Path,
) -> None:
    python = str(fake_python(tmp_path / "python"))
    config = compose(FOUR, "het", **{"site.python": python, "site.env": {"HF_HOME": "/shared/hf"}})
    env = run_script(
        tmp_path, render(config)["run.sbatch"], TMPDIR="/nvme/job 1", PYTHONPATH="/mine"
    ).env
    assert env["RELAX_TMPDIR"] == "/nvme/job 1", "for roles on nodes with another"
    assert (
        env["TRITON_CACHE_DIR"] == "/nvme/job 1/me-relax/triton" and env["HF_HOME"] == "/shared/hf"
    )
    assert (env["PYTHONPATH"], env["PYTHONSAFEPATH"]) == ("/scratch/demo/code:/mine", "1")


def test_lines_of_the_site_come_first_and_reach_what_runs(tmp_path: Path) -> None:
    config = compose(
        FOUR,
        "jobs",
        **{"site.python": str(fake_python(tmp_path / "python")), "site.modules": ["b"]},
    )
    (tmp_path / "profile").write_text("export FROM_PROFILE='a b'\n")
    config.site.setup = [
        "module purge",
        f"source {tmp_path}/profile",
        "ulimit -n 321",
        "false # is no end",
    ]
    config.site.env = {"FILES": "$(ulimit -n)"}
    text = render_group(config, "actor").replace("'$(ulimit -n)'", "$(ulimit -n)")
    ran = run_script(tmp_path, text, **module('printf "%s|" "$@" >>modules'))
    assert (ran.env["FROM_PROFILE"], ran.env["FILES"]) == ("a b", "321")
    assert (tmp_path / "modules").read_text() == "purge|load|b|"
    assert "/etc/profile" not in render_group(compose(FOUR, "jobs"), "actor")
    config.site.srun_options = {"mpi": "none"}
    with pytest.raises(ConfigError, match=r"site.srun_options.mpi: .*set site.mpi.launcher"):
        render(config)


def test_files_of_a_job_are_its_users_alone(tmp_path: Path) -> None:
    text = render(compose(FOUR, "het", **{"site.python": str(fake_python(tmp_path / "python"))}))[
        "run.sbatch"
    ]
    assert text.index("umask 077 ") < text.index("RELAX_LOCAL_DIR")
    run_script(tmp_path, text)
    assert (tmp_path / "out").stat().st_mode & 0o77 == 0


def test_a_missing_module_ends_the_job_as_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    config = compose(FOUR, "het", **{"site.modules": ["cuda/99"]})
    (tmp_path / "script").write_text(render(config)["run.sbatch"])
    env = {"PATH": os.environ["PATH"], **module("return 1")}
    assert subprocess.run(["bash", tmp_path / "script"], env=env, timeout=10).returncode == 78


def test_a_size_by_hand_needs_an_interpreter_with_the_packages(tmp_path: Path) -> None:
    script = ROOT / "slurm" / "1-nodes.sbatch"
    interpreter = f"{tmp_path}/python"
    venv.create(interpreter, with_pip=False)
    settings = {"RELAX_CONFIG": "run.yaml", "RELAX_PYTHON": f"{interpreter}/bin/python"}
    done = subprocess.run(
        ["bash", script],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]} | settings,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == EXIT_CONFIG
    assert done.stderr.endswith("activate its environment before sbatch, or set RELAX_PYTHON\n")
