"""Batch scripts with a fake interpreter: no value is executed, and its environment is complete."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from relax_hpc.base.errors import EXIT_CONFIG, ConfigError
from relax_hpc.cluster.slurm.layout import components
from relax_hpc.cluster.slurm.render import directive, render, render_group
from relax_hpc.config import load
from tests.effort import effort
from tests.helpers.cluster_sizes import FOUR_NODES, ROOT, SITES, compose

FAKE_PYTHON = r"""#!/bin/bash
{ printf '%s\0' "$PWD" "$#" "$@"; env -0; } >"$FAKE_OUT"
"""


class InterpreterCall:
    """Working directory, arguments and environment that the fake interpreter recorded."""

    def __init__(self, path: Path) -> None:
        strings = path.read_bytes().decode("utf-8", "surrogateescape").split("\0")
        count = int(strings[1])
        self.cwd, self.argv, variables = strings[0], strings[2 : 2 + count], strings[2 + count : -1]
        self.env = dict(entry.split("=", 1) for entry in variables)


def run_script(folder: Path, text: str, **env: str) -> InterpreterCall:
    """Run a batch script, whose interpreter is a `fake_python`, and return the recorded call."""
    script, out = folder / "script", folder / "out"
    script.write_text(text)
    out.unlink(missing_ok=True)
    variables = {"PATH": os.environ["PATH"], "USER": "me", "FAKE_OUT": str(out), **env}
    bash = subprocess.run(
        ["bash", script], env=variables, cwd=folder, capture_output=True, text=True, timeout=30
    )
    assert (bash.returncode, bash.stderr) == (0, ""), bash.stderr
    return InterpreterCall(out)


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
def test_values_with_shell_syntax_are_not_executed(tmp_path: Path, value: str, folder: str) -> None:
    run_dir = "/scratch/r" + "".join(
        character for character in folder if character.isprintable() and character not in "%\\"
    )
    python = fake_python(tmp_path / "it's $(touch pwned) `x`" / "python")
    config = compose(
        FOUR_NODES,
        "jobs",
        run_dir=run_dir,
        **{"site.python": str(python), "site.env": {"VALUE": value}},
    )
    config.site.local_dir = "/local/" + folder
    config.site.modules = [value, "b c"]
    (tmp_path / "modules").unlink(missing_ok=True)
    call = run_script(
        tmp_path, render_group(config, "actor"), **module_function('printf "%s|" "$@" >modules')
    )
    assert call.argv == ["-m", "relax_hpc.commands.head", "--run_dir", run_dir, "--group", "actor"]
    assert call.env["VALUE"] == value
    assert call.env["RELAX_LOCAL_DIR"] == f"/local/{folder}/me-relax"
    assert call.env["PYTHONPATH"] == str(Path(run_dir) / "code")
    assert (tmp_path / "modules").read_bytes().decode() == f"load|{value}|b c|"
    assert not list(tmp_path.rglob("pwned"))


def module_function(body: str) -> dict[str, str]:
    """Environment variable with which bash inherits a shell function `module`."""
    return {"BASH_FUNC_module%%": f"() {{ {body}; }}"}


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_sbatch_reads_a_directive_as_one_token(value: str) -> None:
    if not value.isprintable():
        with pytest.raises(ConfigError, match="no line breaks"):
            directive("comment", value)
    elif value:
        assert first_token(directive("comment", value)) == f"--comment={value}"


def first_token(line: str) -> str:
    """First token of a line with the rules that sbatch 22.05 was observed to use: quotes group
    characters, and a backslash escapes the next character."""
    token, quote, position = "", "", 0
    while position < len(line):
        character = line[position]
        if character == "\\":
            position += 1
            token += line[position]
        elif quote or character in "\"'":
            if character == quote or not quote:
                quote = "" if quote else character
            else:
                token += character
        elif character.isspace() or character == "#":
            break
        else:
            token += character
        position += 1
    assert not quote and position == len(line), "the token must be the whole line"
    return token


def test_a_shipped_script_takes_its_files_from_the_environment(tmp_path: Path) -> None:
    python = str(fake_python(tmp_path / "my python"))
    text = (ROOT / "slurm" / "4-nodes.sbatch").read_text()
    files = {
        "RELAX_CONFIG": "a b.yaml:$(touch pwned).yaml",
        "RELAX_SITE": "my site.yaml",
        "RELAX_PYTHON": python,
    }
    call = run_script(tmp_path, text, **files)
    size = f"--config={tmp_path}/configs/clusters/4-nodes.yaml"
    names = ["--config=a b.yaml", "--config=$(touch pwned).yaml", size]
    assert call.argv == ["-m", "relax_hpc.commands.head", *names, "--config=my site.yaml"]
    del files["RELAX_SITE"]
    assert (
        run_script(tmp_path, text, **files, RELAX_HOME="/repo").argv[-1]
        == "--config=/repo" + size.split(str(tmp_path))[1]
    )
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("site", SITES, ids=lambda path: path.stem)
def test_shipped_scripts_are_written_for_a_site(tmp_path: Path, site: Path) -> None:
    tool = [
        sys.executable,
        ROOT / "tools" / "render_templates.py",
        "--site",
        site,
        "--folder",
        tmp_path / "mine",
    ]
    written = subprocess.run(tool, capture_output=True, text=True, timeout=60, check=True)
    text = (tmp_path / "mine" / "4-nodes.sbatch").read_text()
    config = load([FOUR_NODES, site])
    assert text.count("#SBATCH hetjob") == len(components(config)) - 1
    for component in components(config):
        assert all(
            f"#SBATCH --{name}={value}\n" in text for name, value in component.options.items()
        )
    out = tmp_path / "out"
    python = str(fake_python(tmp_path / "python"))
    call = run_script(
        tmp_path,
        text,
        RELAX_CONFIG="run.yaml",
        RELAX_PYTHON=python,
        FAKE_OUT=str(out),
        **module_function("true"),
    )
    assert call.argv[-1] == f"--config={site}" and call.argv[-2].endswith(
        "configs/clusters/4-nodes.yaml"
    )
    if not config.site.cpu_nodes:
        assert "left out: 2-nodes: groups." in written.stderr, "a hub of one node"
    check = subprocess.run([*tool, "--check"], capture_output=True, text=True, timeout=60)
    assert (check.returncode, check.stdout) == (0, "")


def test_a_shipped_script_reports_missing_variables(tmp_path: Path) -> None:
    script = ROOT / "slurm" / "1-nodes.sbatch"
    bash = subprocess.run(
        ["bash", script],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=10,
    )
    assert bash.returncode != 0 and "RELAX_CONFIG: name the files of the run" in bash.stderr


def test_caches_are_on_the_local_disk_unless_the_site_sets_them(
    tmp_path: Path,
) -> None:
    python = str(fake_python(tmp_path / "python"))
    config = compose(
        FOUR_NODES, "het", **{"site.python": python, "site.env": {"HF_HOME": "/shared/hf"}}
    )
    env = run_script(
        tmp_path, render(config)["run.sbatch"], TMPDIR="/nvme/job 1", PYTHONPATH="/mine"
    ).env
    assert env["RELAX_TMPDIR"] == "/nvme/job 1", "roles on other nodes need the value"
    assert (
        env["TRITON_CACHE_DIR"] == "/nvme/job 1/me-relax/triton" and env["HF_HOME"] == "/shared/hf"
    )
    assert (env["PYTHONPATH"], env["PYTHONSAFEPATH"]) == ("/scratch/demo/code:/mine", "1")


def test_setup_lines_of_the_site_run_before_modules(tmp_path: Path) -> None:
    config = compose(
        FOUR_NODES,
        "jobs",
        **{"site.python": str(fake_python(tmp_path / "python")), "site.modules": ["b"]},
    )
    (tmp_path / "profile").write_text("export FROM_PROFILE='a b'\n")
    config.site.setup = [
        "module purge",
        f"source {tmp_path}/profile",
        "ulimit -n 321",
        "false # does not end the script",
    ]
    config.site.env = {"FILES": "$(ulimit -n)"}
    text = render_group(config, "actor").replace("'$(ulimit -n)'", "$(ulimit -n)")
    call = run_script(tmp_path, text, **module_function('printf "%s|" "$@" >>modules'))
    assert (call.env["FROM_PROFILE"], call.env["FILES"]) == ("a b", "321")
    assert (tmp_path / "modules").read_text() == "purge|load|b|"
    assert "/etc/profile" not in render_group(compose(FOUR_NODES, "jobs"), "actor")
    config.site.srun_options = {"mpi": "none"}
    with pytest.raises(ConfigError, match=r"site.srun_options.mpi: .*set site.mpi.launcher"):
        render(config)


def test_files_of_a_job_are_private(tmp_path: Path) -> None:
    text = render(
        compose(FOUR_NODES, "het", **{"site.python": str(fake_python(tmp_path / "python"))})
    )["run.sbatch"]
    assert text.index("umask 077 ") < text.index("RELAX_LOCAL_DIR")
    run_script(tmp_path, text)
    assert (tmp_path / "out").stat().st_mode & 0o77 == 0


def test_a_missing_module_ends_the_job_with_the_code_for_configuration(tmp_path: Path) -> None:
    config = compose(FOUR_NODES, "het", **{"site.modules": ["cuda/99"]})
    (tmp_path / "script").write_text(render(config)["run.sbatch"])
    env = {"PATH": os.environ["PATH"], **module_function("return 1")}
    assert subprocess.run(["bash", tmp_path / "script"], env=env, timeout=10).returncode == 78


def test_a_shipped_script_checks_the_packages_of_its_interpreter(tmp_path: Path) -> None:
    script = ROOT / "slurm" / "1-nodes.sbatch"
    interpreter = f"{tmp_path}/python"
    venv.create(interpreter, with_pip=False)
    settings = {"RELAX_CONFIG": "run.yaml", "RELAX_PYTHON": f"{interpreter}/bin/python"}
    bash = subprocess.run(
        ["bash", script],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]} | settings,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert bash.returncode == EXIT_CONFIG
    assert bash.stderr.endswith("activate its environment before sbatch, or set RELAX_PYTHON\n")
