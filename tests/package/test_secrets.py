# .venv/bin/python -m pytest tests/package/test_secrets.py
"""Values of keys and variables that name a token, key, secret or password are shown nowhere."""

from contextlib import suppress

import pytest

from megatron_vlm.cli import main
from megatron_vlm.errors import ConfigError, hide_secrets, is_secret, show_value
from tests.support.suites import quick
from tests.support.trainer_scripts import AXOLOTL_YAML, LF_YAML, TRL_YAML

VALUE = "s3cr3t"
NAMES = (
    "hub_token push_to_hub_token HF_TOKEN hf-token token WANDB_API_KEY api_key "
    "aws_secret_access_key ray.env_vars.OPENAI_API_KEY apikey password db_passwd api_key "
    "client_secret Authorization ssh_private_key credentials swanlab_secret"
)
PUBLIC = (
    "eos_token pad_token max_new_tokens add_tokens data.image_key prompt_key reward_fn_key "
    "top_k split_special_tokens IMAGE_MAX_TOKEN_NUM keys model.path"
)
SWIFT = ["swift", "sft", "--model", "Qwen/Qwen3-VL-2B-Instruct", "--dataset", "a.jsonl"]
VERL = ["verl.trainer.main_ppo", "actor_rollout_ref.model.path=Qwen/Qwen3-VL-2B-Instruct"]


def test_names_of_secrets():
    assert [name for name in NAMES.split() if not is_secret(name)] == []
    assert [name for name in PUBLIC.split() if is_secret(name)] == []
    for name in NAMES.split():
        for value in (
            *(f"{name}={VALUE}", {name: VALUE}, [{name: VALUE}], [f"--{name}", VALUE]),
            *(f"-x --{name} {VALUE} -y", f'{{"{name}": "{VALUE} more"}}', f"{name}='{VALUE} more'"),
        ):
            shown = show_value(value)
            assert VALUE not in shown and "more" not in shown and "***" in shown, shown
    assert hide_secrets(f"git@https://me:{VALUE}@host/x") == "git@https://***@host/x"
    assert show_value({"eos_token": "</s>"}) == "{'eos_token': '</s>'}"


# Each place: its files, and the words after `megatron-vlm`. NAME and VALUE are replaced.
PLACES = {
    "import LLaMA-Factory": (LF_YAML + "NAME: VALUE\n", "import FILE --from llamafactory"),
    "import TRL": (TRL_YAML + "env: {NAME: VALUE}\n", "import FILE --from trl --ignore env"),
    "import axolotl": (AXOLOTL_YAML + "NAME: [VALUE]\n", "import FILE --from axolotl"),
    "import a value with the wrong type": (LF_YAML + "seed: {NAME: VALUE}\n", "import FILE"),
    "import ms-swift": ("", ["import", *SWIFT, "--NAME", "VALUE"]),
    "import ms-swift by =": ("", ["import", *SWIFT, "--NAME=VALUE"]),
    "import JSON": ("", ["import", *SWIFT, "--foo", '{"NAME": "VALUE"}']),
    "import in front": ("", ["import", "NAME=VALUE", *SWIFT]),
    "import verl": ("", ["import", *VERL, "algorithm.adv_estimator=grpo", "+NAME=VALUE"]),
    "import no command": ("", "import NAME=VALUE"),
    "import a word": ("", ["import", *SWIFT[:2], "NAME:VALUE"]),
    "train key": ("", "train NAME=VALUE --dry-run"),
    "train option": ("", "train --NAME VALUE --dry-run"),
    "train option by =": ("", "train --NAME=VALUE --dry-run"),
    "train mapping": ("", "train --cfg job data.template_kwargs={NAME:VALUE}"),
    "train file": ("NAME: VALUE\n", "train --cfg job --config FILE"),
    "rl engine": ("engine: {options: {NAME: VALUE}}\n", "rl --cfg job --config FILE"),
    "rl nested": ("engine: {options: {a: {NAME: VALUE}}}\n", "rl --cfg job --config FILE"),
    "serve engine": ("", "serve --cfg job +engine.options.NAME=VALUE"),
    "a command without keys": ("", "report runs/none --NAME VALUE"),
    "no command": ("", "NAME=VALUE train"),
}


# Each way into the program once.
QUICK = "import TRL, import ms-swift, train mapping, train file, serve engine, no command"


@pytest.mark.parametrize("place", quick(QUICK.split(", "), PLACES))
def test_no_place_shows_a_secret(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", VALUE)
    text, words = PLACES[place]
    for name in ("hub_token", "WANDB_API_KEY", "password"):
        (tmp_path / "file.yaml").write_text(text.replace("NAME", name).replace("VALUE", VALUE))
        given = words.split() if isinstance(words, str) else words
        given = [word.replace("NAME", name).replace("VALUE", VALUE) for word in given]
        with suppress(SystemExit):  # argparse ends the process
            main([word.replace("FILE", "file.yaml") for word in given])
        output = capsys.readouterr()
        assert output.out + output.err, given
        assert VALUE not in output.out + output.err, (given, output)
    assert VALUE not in str(ConfigError(key="model.hub_token", found=VALUE))
