# .venv/bin/python -m pytest tests/package/test_secrets.py
"""Values of keys and variables that name a token, key, secret or password are shown nowhere."""

import re
from contextlib import suppress

import pytest

from megatron_vlm.cli import main
from megatron_vlm.config.schema import leaves
from megatron_vlm.errors import ConfigError, show_value
from megatron_vlm.secret_text import hide_secrets, is_secret
from tests.support.suites import quick
from tests.support.trainer_scripts import AXOLOTL_YAML, LF_YAML, TRL_YAML

VALUE = "s3cr3t"
NAMES = (
    "hub_token push_to_hub_token HF_TOKEN hf-token token WANDB_API_KEY api_key "
    "aws_secret_access_key ray.env_vars.OPENAI_API_KEY apikey password db_passwd MYSQL_PWD "
    "client_secret Authorization ssh_private_key credentials swanlab_secret api_keys hf_tokens "
    "HF_TOKENS access_tokens apiKey accessToken hub_token[1] credentials.aws.id slack_webhook_url "
    "x-api-key Proxy-Authorization Set-Cookie passwords X-Amz-Signature"
)
PUBLIC = (
    "eos_token pad_token max_new_tokens add_tokens data.image_key prompt_key reward_fn_key "
    "eosToken top_k split_special_tokens IMAGE_MAX_TOKEN_NUM keys model.path tokens max_tokens "
    "tokenizer image_token_id tokenizer_type boi_token prompt_tokens image_keys target_keys "
    "token.py key chosen_key num_tokens tokens_per_second completion_tokens"
)
# Secrets by their names. NAME is replaced by the name of a secret, VALUE and OTHER are secret.
NAMED = """
NAME=VALUE
NAME = VALUE
NAME: VALUE
NAME='VALUE OTHER'
"NAME": "VALUE OTHER"
{\\"NAME\\": \\"VALUE\\"}
{"a": 1, "NAME": ["VALUE", "OTHER"], "b": 2}
NAME: [VALUE, OTHER]
NAME: [[VALUE], [OTHER]]
NAME=VALUE,OTHER
NAME={a: VALUE, b: {c: OTHER}}
{NAME: {a: [VALUE], b: "x}OTHER"}}
NAME: ("VALUE", "OTHER")
NAME:|  - VALUE|  - OTHER
NAME: >-|  VALUE
--NAME VALUE
--NAME=VALUE
--NAME "VALUE OTHER" --x
['--NAME', 'VALUE']
+ray.env_vars.NAME=VALUE
NAME.a=VALUE
NAME[1]=VALUE
NAME[1].id=VALUE
https://host/x?NAME=VALUE
url=https://host/x?a=1&NAME=VALUE&b=2
url: "https://host/x?NAME=VALUE#end"
env: NAME=VALUE
env=[A=1,NAME=VALUE]
env: "A=1 NAME=VALUE"
{'env': ['A=1', 'NAME=VALUE']}
env: [{name: NAME, value: VALUE}]
{"name": "NAME", "value": "VALUE"}
export NAME="VALUE OTHER"
a=b=NAME=VALUE
dataset: {path: a.jsonl, NAME: VALUE}
data.train=[{path: a.jsonl, NAME: VALUE}]
-H "NAME: VALUE"
NAME="VALUE\\"OTHER"
NAME='VALUE;OTHER'
NAME=VALUE;OTHER
NAME=VALUE]OTHER
NAME=VALUE&OTHER
--env NAME=VALUE
x: 3: NAME=VALUE; give it
NAME=>VALUE
""".strip().split("\n")
# Secrets by their place or their form.
NAMELESS = """
Authorization: Bearer VALUE
Authorization: Basic VALUE
authorization: token VALUE
Authorization=Other VALUE, more=OTHER
Proxy-Authorization: Digest username="VALUE", response="OTHER"
-H 'Authorization: Digest a="VALUE", b="OTHER"' https://host
{"headers": {"Authorization": "Bearer VALUE"}}
headers=["X-Auth: Bearer VALUE"]
--header Bearer VALUE
Cookie: session=VALUE; other=OTHER
https://VALUE@host
https://VALUE:OTHER@host/x
git+https://me:VALUE@OTHER@host/x
postgres://me:VALUE@host:5432/x
https://:VALUE@host
https://host/x?X-Amz-Signature=VALUE&x=1
https://host/x?sv=1&sig=VALUE
https://host/x?key=VALUE
x sk-VALUE-0123456789abcdef y
hf_VALUEabcdefghijklmnop34
clone ghp_VALUEabcdefghijklmnop34.
-----BEGIN RSA PRIVATE KEY----- VALUE
""".strip().split("\n")
# Texts that stay as they are.
INNOCENT = r"""
max_tokens=4096
data.max_tokens: 8192
row 3 has 810 tokens: give data.max_tokens=1024
tokens: [a, b]
tokenizer=Qwen/Qwen3-VL-2B-Instruct
{'eos_token': '</s>', 'pad_token': '<|endoftext|>'}
image_token_id=151655
image_token: <|image_pad|>
new_special_tokens: [<a>, <b>]
completion_tokens=12, prompt_tokens=5
rl.reward=count_token.py:score
data.image_key=photo
prompt_key: question
keys: a, b
unknown_keys=[x, y]
use_auth_token: false
hub_token=null
https://host:8000/x?split=train&name=a
https://host/x@main
hf://datasets/org/name@main/a.jsonl
git@github.com:org/name
ssh://git@github.com/org/name
me@host.org wrote
the bearer of the news
Basic shapes are learnt
sk-learn-and-other-long-words
--max_tokens 5 --tokenizer x
rerank.positive_token=yes
a=b, c=d; e: f
tokens_per_second=3.5
{"num_tokens": 3, "token_type_ids": [0, 1]}
split_special_tokens: true
no key is known: give --from
data.add_tokens=[<b>,<c>]
""".strip().split("\n")
SWIFT = ["swift", "sft", "--model", "Qwen/Qwen3-VL-2B-Instruct", "--dataset", "a.jsonl"]
_GRPO = ["algorithm.adv_estimator=grpo"]
VERL = ["verl.trainer.main_ppo", "actor_rollout_ref.model.path=Qwen/Qwen3-VL-2B-Instruct"]


def test_names_of_secrets():
    assert [name for name in NAMES.split() if not is_secret(name)] == []
    assert [name for name in [*PUBLIC.split(), *leaves()] if is_secret(name)] == []
    for name in NAMES.split():
        for value in (f"{name}={VALUE}", {name: VALUE}, [{name: VALUE}], [f"--{name}", VALUE]):
            shown = show_value(value)
            assert VALUE not in shown and "***" in shown, shown
        assert show_value([VALUE], name) == "***"


def test_texts_show_no_secret():
    """A text is shown as it is, in quotes, and shortened."""
    names = ("hub_token", "HF_TOKENS", "WANDB_API_KEY", "api_keys", "db.password", "x-api-key")
    pairs = (("pa55word", "s3cr3t"), ("sk-X", "sk-Y"), ("a/b+c==", "y%z/w"))
    forms = [(form, names) for form in NAMED] + [(form, names[:1]) for form in NAMELESS]
    texts = {
        form.replace("|", "\n").replace("NAME", name).replace("VALUE", one).replace("OTHER", two): (
            pair
        )
        for form, its_names in forms
        for name in its_names
        for pair in pairs[: 3 if form in NAMED else 1 if "_VALUE" in form else 2]
        for one, two in [pair]
    }
    shown = [
        (hide(text), secrets)
        for text, secrets in texts.items()
        for hide in (hide_secrets, show_value, lambda text: show_value("x" * 150 + " " + text))
    ]
    assert [text for text, secrets in shown if any(each in text for each in secrets)] == []
    assert [text for text in map(hide_secrets, texts) if "***" not in text] == []
    again = [text for text, _ in shown if hide_secrets(text) != text]
    assert again == []
    assert [(hide_secrets(text), text) for text in INNOCENT if hide_secrets(text) != text] == []


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
    "import verl": ("", ["import", *VERL, *_GRPO, "+NAME=VALUE"]),
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
_LF = re.sub("(?m)^dataset: .*\n", "", LF_YAML)
_URL = "https://host/x?NAME=VALUE"
PLACES |= {
    f"import LLaMA-Factory {name}": (f"{text}\n", "import FILE")
    for name, text in {
        "a mapping as a set": f"{_LF}dataset: {{NAME: VALUE}}",
        "a mapping among sets": f"{_LF}dataset: [{{path: a, NAME: VALUE}}]",
        "a mapping as a folder": f"{LF_YAML}output_dir: {{NAME: VALUE}}",
        "a list": f"{LF_YAML}NAME: [VALUE, VALUE]",
        "an address": f"{LF_YAML}output_dir: {_URL}",
        "a login": f"{LF_YAML}output_dir: https://VALUE@host/x",
        "a tracker": f"{LF_YAML}report_to: [wandb, 'NAME=VALUE']",
        "an alias": f"{LF_YAML}NAME: *VALUE",
        "a tag": f"{LF_YAML}NAME: !VALUE x",
        "binary": f"{LF_YAML}NAME: !!binary VALUE",
        "a handle": f"{LF_YAML}NAME: !VALUE!x y",
        "several lines": f"{LF_YAML}foo: |\n  NAME: VALUE\n  a: b",
        "a header": f"{LF_YAML}foo: 'Authorization: Bearer VALUE'",
    }.items()
}
PLACES |= {
    "import TRL env": (TRL_YAML + "env: NAME=VALUE\n", "import FILE --from trl"),
    "import TRL name": (TRL_YAML + "dataset_config: {NAME: VALUE}\n", "import FILE --from trl"),
    "import TRL kwargs": (
        TRL_YAML + "model_init_kwargs: {NAME: VALUE}\n",
        "import FILE --from trl",
    ),
    "import axolotl path": (AXOLOTL_YAML.replace("chats.jsonl", _URL), "import FILE"),
    "import axolotl entry": (
        AXOLOTL_YAML.replace("chats.jsonl", "chats.jsonl\n    roles: {user: [a], NAME: [VALUE]}"),
        "import FILE",
    ),
    "import axolotl words": (AXOLOTL_YAML, "import axolotl train FILE --NAME VALUE VALUE"),
    "import a file with words": (LF_YAML, "import FILE --NAME VALUE VALUE"),
    "import a number": (LF_YAML, "import FILE --gpus NAME=VALUE"),
    "import ms-swift list": ("", ["import", *SWIFT, "--NAME", "VALUE", "VALUE"]),
    "import ms-swift prompt": ("", ["import", *SWIFT, "--system", "NAME=VALUE"]),
    "import ms-swift columns": ("", ["import", *SWIFT, "--columns", '{"NAME": "VALUE"}']),
    "import ms-swift set": ("", ["import", *SWIFT, "--val_dataset", "https://VALUE@h/x:a#5"]),
    "import verl words": ("", ["import", *VERL, "--NAME", "VALUE", "VALUE"]),
    "import verl set": ("", ["import", *VERL, *_GRPO, "data.train_files={NAME: VALUE}"]),
    "import verl env": ("", ["import", *VERL, *_GRPO, "+ray_kwargs.env=[NAME=VALUE]"]),
    "import verl name": ("", ["import", *VERL, *_GRPO, "trainer.experiment_name=NAME=VALUE"]),
    "train address": ("", f"train --cfg job model.path=x data.train={_URL}"),
    "train login": ("", "train --cfg job model.path=x data.train=https://VALUE@host/x"),
    "rl list": ("", "rl --cfg job model.path=x +engine.options.NAME=[VALUE,VALUE]"),
    "rl env": ("", "rl --cfg job model.path=x +engine.options.env='NAME=VALUE'"),
    "rl header": ("", ["rl", "--cfg", "job", "+engine.options.a='Authorization: Bearer VALUE'"]),
    "report words": ("", "report runs/none --NAME VALUE VALUE"),
}


# Each way into the program once.
QUICK = (
    "import TRL, import ms-swift, import LLaMA-Factory a mapping as a set, "
    "import ms-swift columns, train mapping, train file, train address, serve engine, no command"
)


@pytest.mark.parametrize("place", quick(QUICK.split(", "), PLACES))
def test_no_place_shows_a_secret(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", VALUE)
    text, words = PLACES[place]
    for name in ("hub_token", "WANDB_API_KEYS", "password"):
        (tmp_path / "file.yaml").write_text(text.replace("NAME", name).replace("VALUE", VALUE))
        given = words.split() if isinstance(words, str) else words
        given = [word.replace("NAME", name).replace("VALUE", VALUE) for word in given]
        with suppress(SystemExit):  # argparse ends the process
            main([word.replace("FILE", "file.yaml") for word in given])
        output = capsys.readouterr()
        assert output.out + output.err, given
        assert VALUE not in output.out + output.err, (given, output)
    assert VALUE not in str(ConfigError(key="model.hub_token", found=VALUE))
