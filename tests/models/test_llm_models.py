"""Finding models, fetching them, and reading them ahead. The hub is a server on this machine."""

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
import textwrap

import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.models import hub
from slurmgpu.llm.models.decoders import ENCODERS, GENERATES, check_decoder, check_tokenizer
from slurmgpu.llm.models.read_ahead import read_ahead
from slurmgpu.llm.models.source import cache_of, check_unchanged, digests_of, fetch, files_of, find_model
from slurmgpu.plan.planner import draft_run
from tests.support.hubs import COMMIT, serving
from tests.support.tiny_models import make_llama

CONFIG = {"model_type": "llama", "hidden_size": 8}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def make(folder, **config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def in_cache(tmp_path, name, commit=COMMIT, **config):
    repository = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return make(repository / "snapshots" / commit, **config)


# Content.


def test_a_folder_whose_files_changed_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("slurmgpu.util.hashing.WHOLE_BYTES", 100_000)
    folder = make(tmp_path / "m")
    for name in ("tokenizer.json", "model-1.safetensors", "notes.txt"):
        (folder / name).write_text("{}")
    size = 64 << 20
    with open(folder / "model-2.safetensors", "wb") as file:
        file.truncate(size)
    source = find_model("m")
    planned = digests_of(source)
    assert set(planned) == {"config.json", "tokenizer.json", "model-1.safetensors", "model-2.safetensors"}
    (folder / "notes.txt").write_text("read")
    for path in folder.iterdir():
        os.utime(path, (1, 1))  # as a copy of the folder has other times
    check_unchanged(source, planned)

    with open(folder / "model-2.safetensors", "r+b") as file:
        file.seek(size // 2 - size // 64)
        file.write(b"\1" * (size // 64))
    (folder / "chat_template.jinja").touch()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SlurmGPUError) as raised:
        check_unchanged(source, planned)
    said = "planned: model-2.safetensors is changed; tokenizer.json is missing; chat_template.jinja is new."
    assert said in str(raised.value)


def test_a_commit_of_the_hub_needs_no_digests(tmp_path):
    in_cache(tmp_path, "lab/model")
    assert digests_of(find_model("lab/model")) is None


# Names.


@pytest.mark.parametrize(
    ("folders", "name", "found", "quantization"),
    [
        (["llama"], "llama", "llama", None),
        (["llama"], "llama-8bit", "llama", "8bit"),
        (["llama"], "./llama-fp8", "llama", "fp8"),
        (["llama", "llama-4bit"], "llama-4bit", "llama-4bit", None),
        (["zoo/big/llama"], "zoo/big/llama-4bit", "zoo/big/llama", "4bit"),
    ],
)
def test_a_folder_of_the_whole_name_comes_before_a_suffix(tmp_path, folders, name, found, quantization):
    for folder in folders:
        make(tmp_path / folder)
    source = find_model(name)
    assert source.folder == tmp_path / found
    assert (source.quantization, source.name, source.repository) == (quantization, name, None)
    assert source.config == CONFIG
    assert files_of(source) == [tmp_path / found]


def test_a_packages_model_takes_a_suffix_and_is_not_bound_into_an_image(tmp_path, monkeypatch):
    make(tmp_path / "carrier" / "model")
    (tmp_path / "carrier" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    source = find_model("package:carrier-8bit")
    assert (source.folder, source.quantization) == (tmp_path / "carrier" / "model", "8bit")
    assert files_of(source) == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "there is no folder ''"),
        ("./nowhere", "there is no folder './nowhere'"),
        ("/no/where-8bit", "there is no folder '/no/where'; expected"),
        ("a/b/c", "there is no folder 'a/b/c'"),
        ("./emty", "\"package:NAME\". Did you mean 'empty'?"),
        ("https://huggingface.co/lab/model", "is a URL; expected the model's name on the hub, here 'lab/model'."),
        ("https://huggingface.co/lab/model/tree/main", "expected the model's name on the hub, here 'lab/model'."),
        ("empty", "has no config.json; expected a model folder"),
        ("quantised-8bit", "is already quantised (quantization_config in its config.json: awq). Remove the suffix."),
        ("own", "has its own code, which does not run without your permission"),
    ],
)
def test_a_name_that_is_no_model_is_refused_with_what_was_expected(tmp_path, name, sentence):
    (tmp_path / "empty").mkdir()
    make(tmp_path / "quantised", quantization_config={"quant_method": "awq"})
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text('{"auto_map": {"AutoModelForCausalLM": "code.Model"}}')
    with pytest.raises(SlurmGPUError) as raised:
        find_model(name)
    assert sentence in str(raised.value)
    assert find_model("own", trust_remote_code=True).quantization is None
    assert find_model("quantised").config["quantization_config"] == {"quant_method": "awq"}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"])
def test_a_clone_without_the_large_files_is_refused(tmp_path, name):
    folder = make(tmp_path / "clone")
    assert find_model(str(folder)).folder == folder
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n")
    with pytest.raises(SlurmGPUError, match=f"{name} is a pointer of Git LFS, not the file. Type `git lfs pull` in"):
        find_model(str(folder))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/c", "HF_HOME": "/b"}, "/c"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/d"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({"HF_HOME": "~/x"}, "/home/ada/x/hub"),
        ({"HF_HOME": "$HOME/y"}, "/home/ada/y/hub"),
        ({}, "/home/ada/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(monkeypatch, environment, expected):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/ada", **environment}.items():
        monkeypatch.setenv(name, value)
    assert str(hub.cache_folder()) == expected
    code = "import huggingface_hub.constants as c; print(c.HF_HUB_CACHE)"
    if len(environment) == 2:
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert said.stdout.strip() == expected


def test_what_lies_in_the_cache_is_found_without_asking_anybody(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it is an error
    in_cache(tmp_path, "lab/model", hidden_size=9)
    in_cache(tmp_path, "lab/model-4bit", hidden_size=10)
    old = make(tmp_path / "cache" / "models--lab--model" / "snapshots" / "0ld", hidden_size=11)
    source = find_model("lab/model-8bit")
    assert (source.repository, source.revision, source.quantization) == ("lab/model", COMMIT, "8bit")
    assert files_of(source) == [tmp_path / "cache" / "models--lab--model"]
    assert cache_of(source) == tmp_path / "cache"
    assert find_model("lab/model", revision="0ld").folder == old
    assert find_model("lab/model-4bit").config["hidden_size"] == 10
    assert find_model("lab/model-4bit").quantization is None
    with pytest.raises(SlurmGPUError, match=r"not in the hub's cache, .*/cache\. .*pip install 'slurmgpu\[llm\]'"):
        find_model("lab/other")


# The hub.

FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": b"s" * 100,
    "pytorch_model.bin": b"b" * 100,
    "original/consolidated.00.pth": b"o" * 100,
    "model.gguf": b"g" * 100,
}
PICKLED = {"config.json": FILES["config.json"], "pytorch_model.bin": b"b", "tf_model.h5": b"h"}


def ask(code, address, cache, **more):
    """What a Python prints that knows this hub; huggingface_hub reads its environment once."""
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0", **more}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


ASK = """
    import sys
    from slurmgpu.errors import SlurmGPUError
    from slurmgpu.llm.models.source import fetch, find_model
    for name, revision in {names}:
        try:
            source = find_model(name, revision=revision)
            print(source.repository, source.quantization, source.revision, source.asked)
        except SlurmGPUError as error:
            print(error)
    """


def test_the_hubs_answers_are_sentences(tmp_path):
    names = [
        ("lab/model-8bit", None),
        ("lab/other-4bit", None),
        ("lab/model", "nope"),
        ("lab/gated", None),
        ("lab/none", None),
        ("a b/c", None),
    ]
    with serving({"lab/model": FILES, "lab/other-4bit": FILES}, lab__gated="GatedRepo") as there:
        said = ask(ASK.format(names=names), there.address, tmp_path / "cache")
        assert there.downloaded() == {"config.json"}
    assert said[0] == f"lab/model 8bit {COMMIT} None"
    assert said[1] == f"lab/other-4bit None {COMMIT} None"
    assert said[2] == "model 'lab/model' has no revision 'nope' on the hub. Correct `revision`."
    assert "accept its licence at https://huggingface.co/lab/gated, and set HF_TOKEN" in said[3]
    assert "the repository does not exist, or is private" in said[4]
    assert "the name is not valid" in said[5]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with serving({"lab/model": FILES}) as there:
        [said] = ask(ASK.format(names=[("lab/model", None)]), there.address, tmp_path / "file" / "cache")
    assert f"cannot be written into the hub's cache, {tmp_path}/file/cache: Not a directory. Set HF_HOME" in said


def test_a_folder_of_nearly_the_name_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "models" / "adder")
    (tmp_path / "models" / "adderr.txt").touch()
    (tmp_path / "adder").mkdir()
    names = [("adderr", None), ("models/adderr-8bit", None)]
    with serving({}) as there:
        known = ask(ASK.format(names=names), there.address, tmp_path / "cache")
    offline = ask(ASK.format(names=names), "http://127.0.0.1:1", tmp_path / "cache", HF_HUB_OFFLINE="1")
    for said in (known, offline):
        assert "Did you mean 'adder'?" in said[0]
        assert "Did you mean 'models/adder'?" in said[1]


def test_without_network_the_sentence_says_how_to_download(tmp_path):
    [said] = ask(ASK.format(names=[("lab/model", None)]), "http://127.0.0.1:1", tmp_path, HF_HUB_OFFLINE="1")
    assert "is neither a folder here nor in the hub's cache" in said
    assert "Download it with `slurmgpu check --fetch` on a machine with network" in said


def test_fetching_takes_safetensors_alone_where_there_are_any(tmp_path):
    code = ASK.format(names=[]) + "\n    for name in ('lab/model-8bit', 'lab/old'): print(fetch(find_model(name)))"
    with serving({"lab/model": FILES, "lab/old": PICKLED}) as there:
        said = ask(code, there.address, tmp_path / "cache")
        assert there.downloaded() == {"config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin"}
    source = find_model("lab/model")
    assert said[0].startswith(f"lab/model at {COMMIT[:12]} is in {source.folder}, ")
    assert {path.name for path in source.folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    folder = make(tmp_path / "local")
    assert fetch(find_model("local")) == f"the model is in {folder}, 0.0 MB: nothing to download"


def test_fetching_without_network_is_content_with_a_cache_that_is_whole(tmp_path):
    model = FILES | {"model.safetensors.index.json": b'{"weight_map": {"a": "model.safetensors"}}'}
    no_waiting = "\n    import time; time.sleep = lambda seconds: None"  # the hub's client tries again for 23 s
    code = ASK.format(names=[]) + no_waiting + "\n    print(fetch(find_model('lab/model', revision='main')))"
    with serving({"lab/model": model}) as there:
        ask(code, there.address, tmp_path / "cache")
    away = {"address": "http://127.0.0.1:1", "cache": tmp_path / "cache"}
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):
        [said] = ask(code, **away, **more)
        assert said.startswith(f"lab/model at {COMMIT[:12]} (main) is in the cache, {tmp_path}/cache/")
        assert said.endswith("; the hub could not be reached")
    source = find_model("lab/model")
    (source.folder / "model.safetensors").unlink()
    code = code.replace("print(fetch(", "\n    try: print(fetch(") + "\n    except SlurmGPUError as error: print(error)"
    [said] = ask(code, **away, HF_HUB_OFFLINE="1")
    assert said.startswith("model 'lab/model' at revision")


@pytest.fixture
def files(tmp_path):
    """A model of the hub, by file; and a run file that names it."""
    model = make_llama(tmp_path / "made")
    (tmp_path / "items.jsonl").write_text('{"text": "1+2="}\n' * 3)
    (tmp_path / "slurmgpu.toml").write_text(
        'input = "items.jsonl"\nrun_dir = "run"\n[workload]\nuse = "generate"\n[resources]\ngpus = 0\n[settings]\n'
        'model = "lab/llama"\nprompt = "{text}"\nmax_tokens = 4\nprecision = "fp32"\n'
    )
    return {path.name: path.read_bytes() for path in model.iterdir()}


@pytest.fixture
def call(tmp_path, slurmgpu):
    """A command, beside that run file, by which the hub is at `address`."""
    environment = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}
    return lambda *argv, address, expect: slurmgpu(
        *argv, cwd=tmp_path, expect=expect, HF_ENDPOINT=address, **environment
    )


def test_a_hub_model_is_fetched_before_submission_and_never_by_a_task(tmp_path, files, call):
    with serving({"lab/llama": files}) as there:
        said = call("submit", "--executor", "local", address=there.address, expect=2).stderr
        assert "`slurmgpu check --fetch` on a machine with network" in said
        assert not (tmp_path / "run").exists()
        said = call("check", "--fetch", address=there.address, expect=None).stdout
        assert f"✓ fetch      lab/llama at {COMMIT[:12]} is in {tmp_path}/cache/" in said
        assert "✓ plan " in said
    with draft_run(tmp_path / "slurmgpu.toml", {"settings": {"model": "lab/llama-8bit"}}):
        pass  # of a name with a suffix, the model without it is in the cache
    call("submit", "--executor", "local", address="http://127.0.0.1:1", expect=0)
    plan = json.loads((tmp_path / "run" / "run.json").read_text())
    assert plan["settings"]["revision"] == COMMIT
    assert plan["paths"] == [str(tmp_path / "cache" / "models--lab--llama")]
    assert plan["environ"]["HF_HUB_CACHE"] == str(tmp_path / "cache")
    assert plan["environ"]["HF_HUB_OFFLINE"] == "1"


@pytest.mark.nightly
def test_a_check_without_network_says_that_once(files, call):
    """The hub's client, which has logs of its own, tries for 23 seconds."""
    with serving({"lab/llama": files}) as there:
        call("check", "--fetch", address=there.address, expect=None)
    said = call("check", "--fetch", address="http://127.0.0.1:1", expect=None)
    assert "; the hub could not be reached" in said.stdout
    assert "Retrying" not in said.stderr + said.stdout


def test_a_workload_without_a_model_has_nothing_to_fetch(project, slurmgpu):
    said = slurmgpu("check", "--fetch", cwd=project(4)).stdout
    assert "✓ fetch      workload Rows has nothing to download" in said


# What can generate.


@pytest.mark.parametrize(
    ("config", "decodes"),
    [
        ({}, True),
        ({"architectures": ["LlamaForCausalLM"]}, True),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, True),
        ({"architectures": ["Qwen3Model"]}, True),  # a trunk whose head may be tied: loading looks at its weights
        ({"architectures": ["OwnModel"]}, True),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert"}, True),
        ({"architectures": ["BertModel"], "model_type": "bert"}, False),
        ({"model_type": "roberta"}, False),
        ({"architectures": ["ModernBertForMaskedLM"], "model_type": "modernbert"}, False),
        ({"architectures": ["LlamaForSequenceClassification"]}, False),
    ],
)
def test_what_does_not_generate_text_is_refused_by_its_config(tmp_path, config, decodes):
    source = find_model(str(make(tmp_path / "model", **config)))
    refused = pytest.raises(SlurmGPUError, match="which does not generate text; expected a decoder")
    with contextlib.nullcontext() if decodes else refused:
        check_decoder(source)


def test_encoders_are_models_for_masks_in_transformers():
    modeling = pytest.importorskip("transformers.models.auto.modeling_auto")
    assert set(ENCODERS) <= set(modeling.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    names = modeling.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert [name for name in names if isinstance(name, str) and not GENERATES.search(name)] == []


@pytest.mark.parametrize(
    ("files", "suffices"),
    [
        ({"tokenizer.json": "{}"}, True),
        ({"spiece.model": ""}, True),
        ({"vocab.txt": ""}, True),
        ({"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["code.Tokenizer", null]}}'}, True),
        ({"tokenizer_config.json": '{"tokenizer_class": "ByT5Tokenizer"}'}, True),
        ({"tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}', "model.safetensors": ""}, False),
        ({}, False),
    ],
)
def test_a_folder_without_a_tokenizer_is_refused(tmp_path, files, suffices):
    folder = make(tmp_path / "model")
    for name, content in files.items():
        (folder / name).write_text(content)
    refused = pytest.raises(SlurmGPUError, match=r"there is no tokenizer in .*model; expected tokenizer\.json")
    with contextlib.nullcontext() if suffices else refused:
        check_tokenizer(find_model(str(folder)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"remove": "tokenizer.json"}, "there is no tokenizer in"),
        ({"config": {"model_type": "bert", "architectures": []}}, "does not generate text"),
        ({"config": {"model_type": "t5", "is_encoder_decoder": True}}, "is an encoder-decoder model"),
    ],
)
def test_planning_refuses_a_model_that_cannot_answer(project, tmp_path, changes, said):
    folder = make_llama(tmp_path / "model")
    if "remove" in changes:
        (folder / changes["remove"]).unlink()
        (folder / "tokenizer_config.json").unlink()
    else:
        make(folder, **json.loads((folder / "config.json").read_text()) | changes["config"])
    there = project(4, settings={"model": str(folder), "prompt": "{text}"}, resources={"gpus": 0})
    run_file, workload = there / "slurmgpu.toml", {"workload": {"use": "generate"}}
    with pytest.raises(SlurmGPUError, match=said), draft_run(run_file, workload):
        pass


# Reading ahead.


def test_weights_are_read_ahead_once_and_nothing_fails(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = make(tmp_path / "model")
    read_ahead(folder)
    read_ahead(tmp_path / "nowhere")
    assert not caplog.messages
    for name in "abcdef":
        (folder / f"{name}.safetensors").write_bytes(b"x" * 1000)
    read_ahead(folder)
    assert caplog.messages[-1].startswith("read 0.00 GB of weights in ")
    read_ahead(folder)
    assert caplog.messages[-1] == "another process on this node has read the weights ahead"
    (folder / "a.safetensors").write_bytes(b"y" * 1001)
    read_ahead(folder)
    assert caplog.messages[-1].startswith("read 0.00 GB of weights in ")
    with open(folder / "huge.safetensors", "wb") as file:
        file.truncate(10**14 // 16)
    read_ahead(folder)
    assert "of weights ahead" in caplog.messages[-1]
    (folder / "huge.safetensors").unlink()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    read_ahead(folder)
    assert "ahead: " in caplog.messages[-1]


@pytest.fixture
def was_read(tmp_path, caplog, monkeypatch):
    """A model whose weights have been read ahead, and the lock that this left in the shared temporary folder."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = make(tmp_path / "model")
    (folder / "a.safetensors").write_bytes(b"x" * 1000)
    read_ahead(folder)
    [path] = tmp_path.glob("slurmgpu-reads-*")
    return folder, path


def test_no_lock_that_another_user_may_hold_is_waited_for(was_read, caplog):
    folder, path = was_read
    path.chmod(0o666)
    with path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        read_ahead(folder)
    assert "users other than its owner may write it (mode 0666)" in caplog.messages[-1]


def test_no_file_is_overwritten_to_which_another_user_may_have_linked_a_locks_name(was_read, tmp_path, caplog):
    folder, path = was_read
    path.unlink()
    (tmp_path / "own").write_text("precious")
    path.hardlink_to(tmp_path / "own")
    read_ahead(folder)
    assert (tmp_path / "own").read_text() == "precious"
    assert "it has another name as well" in caplog.messages[-1]
