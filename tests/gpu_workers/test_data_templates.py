"""Foreign templates: what they may see, and what they cannot do."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

import finery_gpu_workers
from finery_gpu_workers.data import chat
from finery_gpu_workers.data.chat import RowError, Template
from finery_gpu_workers.errors import WorkerError
from finery_testing.tiny import CHAT_TEMPLATE

from .samples import HI, HI_OK, OK, one, text_of


def template(source: str = CHAT_TEMPLATE) -> Template:
    return Template(source, {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}, datetime(2026, 11, 30, tzinfo=UTC))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__self__.__class__.__subclasses__() }}",
        "{% for _ in range(1000000000) %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{% for m in messages %}",
        "x" * (chat.MAX_TEMPLATE_BYTES + 1),
    ],
)
def test_h12_templates_cannot_reach_out_or_change_the_row(source: str) -> None:
    messages = [dict(message) for message in HI_OK]
    with pytest.raises(WorkerError) as error:
        template(source).render(messages)
    assert error.value.code == "invalid_chat_template"
    assert messages == HI_OK


def test_h12_output_of_a_template_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDERED_CHARACTERS", 1000)
    source = "{% for a in range(100) %}{% for b in range(100) %}xx{% endfor %}{% endfor %}"
    with pytest.raises(WorkerError, match="at most 1000 characters"):
        template(source).render(HI_OK)


def test_h12_no_jinja_environment_outside_the_one_helper() -> None:
    root = Path(finery_gpu_workers.__file__).parents[3]
    pattern = re.compile(r"jinja2|apply_chat_template|from_string\(")
    users = {p.name for p in root.glob("*/src/**/*.py") if pattern.search(p.read_text()) and "tests" not in p.parts}
    assert users == {"chat.py"}


def test_generation_marks_render_what_they_enclose() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert template(source).render(HI_OK) == "hiok"


def test_templates_see_special_tokens_the_time_and_plain_json() -> None:
    source = "{{ bos_token }}{{ strftime_now('%Y') }}{{ {'a': '<é>'} | tojson }}{% if tools %}!{% endif %}"
    assert template(source).render(HI_OK) == '<|bos|>2026{"a": "<é>"}'


def test_the_template_is_found_in_either_place(tmp_path: Path) -> None:
    settings = {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert chat.template_source(tmp_path) == "A"
    (tmp_path / "chat_template.jinja").write_bytes(b"C\r\n")
    assert chat.template_source(tmp_path) == "C\r\n"
    with pytest.raises(WorkerError, match="found neither"):
        chat.template_source(tmp_path / "nowhere")


@pytest.mark.parametrize("expression", ["messages[0].items ~ ''", "messages|map(attribute='role')", "cycler('a')"])
def test_a_template_that_writes_addresses_of_the_process_is_refused(expression: str) -> None:
    with pytest.raises(RowError, match="another text in every run") as error:
        one(HI_OK, CHAT_TEMPLATE + "{{ " + expression + " }}")
    assert error.value.code == "template_error"
    row = [HI, {"role": "assistant", "content": "<function f at 0x7f9aab23af40>"}]
    assert text_of(one(row)) == "<function f at 0x7f9aab23af40>$"


@pytest.mark.parametrize("expression", ["range(9)|random", "lipsum()"])
def test_a_template_has_no_chance_in_it(expression: str) -> None:
    source = CHAT_TEMPLATE + "{% if not add_generation_prompt %}{{ " + expression + " }}{% endif %}"
    with pytest.raises((RowError, WorkerError)):
        one(HI_OK, source)


def test_the_place_is_that_of_the_uploaded_row() -> None:
    source = CHAT_TEMPLATE.replace("assistant\\n' }}{%- endif", "assistant\\nSure: ' }}{%- endif")
    with pytest.raises(RowError) as error:
        one({"prompt": [HI], "completion": [OK]}, source)
    assert error.value.path == "completion[0]"
