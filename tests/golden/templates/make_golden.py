"""Renders every case with transformers and writes golden.json.

    pip install transformers jinja2
    python make_golden.py

The reference is `render_jinja_template`, behind the same clean-up of messages that `apply_chat_template` does. The clock
is fixed. Outputs are stored with the versions that made them.
"""

import datetime as real_datetime
import json
import pathlib

import jinja2
import transformers
from transformers.utils import chat_template_utils as reference

import cases

HERE = pathlib.Path(__file__).parent
NOW = real_datetime.datetime(2024, 2, 29, 12, 35, 3)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


class FixedClock(real_datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


reference.datetime = FixedClock


def render(source, case):
    case = dict(case)
    conversation = reference._normalize_chat_messages(case.pop("messages"))
    case.setdefault("add_generation_prompt", True)
    try:
        rendered, _ = reference.render_jinja_template([conversation], chat_template=source, **{**TOKENS, **case})
        return {"output": rendered[0]}
    except Exception as error:  # what matters is that it fails, and what the template itself says
        raised = type(error) is jinja2.exceptions.TemplateError
        return {"raised": str(error)} if raised else {"error": type(error).__name__}


def expression(source):
    return render(source, {"messages": [{"role": "user", "content": "x"}], **cases.EXPRESSION_VARIABLES})


golden = {
    "reference": {"transformers": transformers.__version__, "jinja2": jinja2.__version__},
    "unix_seconds": int(NOW.replace(tzinfo=real_datetime.timezone.utc).timestamp()),
    "tokens": TOKENS,
    "conversations": cases.CONVERSATIONS,
    "variables": cases.EXPRESSION_VARIABLES,
    "templates": {
        path.stem: {name: render(path.read_text(), case) for name, case in cases.CONVERSATIONS.items()}
        for path in sorted(HERE.glob("*.jinja"))
    },
    "expressions": [{"source": source, **expression(source)} for source in cases.EXPRESSIONS],
}
(HERE / "golden.json").write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")
print(sum(len(t) for t in golden["templates"].values()), "renders,", len(golden["expressions"]), "expressions")
