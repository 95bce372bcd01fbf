import pytest

from sapwood_common.errors import ConfigError, InvalidArgumentError
from sapwood_tokenizer.template.chat_template import ChatTemplate
from sapwood_tokenizer.template.sandbox import Budget
from sapwood_tokenizer.vocab.loader import LoadedTokenizer

USER = [{"role": "user", "content": "x"}]
CONVERSATION = [
    {"role": "system", "content": "Be brief. <é>"},
    {"role": "user", "content": "  Hi\n"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]

# What published templates use, each a piece of its own.
TEMPLATES = [
    "{% for m in messages %}\n  {% if loop.first %}\n{{ m['content'] }}\n  {% endif %}\n{% endfor %}\nend",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ loop.index0 % 2 }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}|{% endfor %}",
    "{% for m in messages[1:] if m.role == 'user' %}{{ m.content | trim }}{% else %}none{% endfor %}",
    "{% set ns = namespace(n=0, text='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.text = ns.text ~ m.content %}{% endfor %}{{ ns.n }}{{ ns.text }}",
    "{% macro turn(m, mark='|') %}{{ mark + m.role }}{{ caller() if caller else '' }}{% endmacro %}"
    "{% for m in messages %}{% call turn(m) %}{{ m.content * 2 }}{% endcall %}{{ turn(m, '#') }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}[{{ m.content }}]{% endif %}{% endfor %}",
    "{% set text %}{% for m in messages %}{{ m.role | upper }}{% endfor %}{% endset %}{{ text | lower }}",
    "{% set text | upper %}{{ messages[0].content }}{% endset %}{{ text }}{{ messages | length }}",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ messages | map(attribute='role') | join(',') }}",
    "{{ messages[::-1] | tojson }}{% for a, b in messages[0].items() %}{{ a }}={{ b }};{% endfor %}",
    "{{ tools is none }}{{ documents is none }}{{ missing is defined }}{{ add_generation_prompt }}{{ bos_token }}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{{ loop.depth }}{% endfor %}",
    "{{ 2 ** 10 }} {{ 'ab' * 3 }} {{ [1] + [2] }} {{ '%s' % 'x' }} {{ strftime_now('%%') }}{{ range(5) | list }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_renders_as_by_transformers(template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    ours = ChatTemplate(template, {"bos_token": "<s>"}).render(CONVERSATION, add_generation_prompt=True)
    theirs, _ = render_jinja_template(
        [CONVERSATION], chat_template=template, add_generation_prompt=True, bos_token="<s>"
    )
    assert ours == theirs[0]


@pytest.mark.parametrize(
    "runaway",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_runs_on_is_stopped_when_its_time_is_over(runaway: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"did not end within 0\.2 s") as caught:
        ChatTemplate(runaway, {}).render(USER, add_generation_prompt=True, budget=Budget(0.2, 1000))
    assert caught.value.field == "messages"


def test_a_rendering_that_nobody_waits_for_any_more_ends() -> None:
    budget = Budget(1000.0, 1000)
    budget.cancel()
    with pytest.raises(InvalidArgumentError, match="cancelled"):
        ChatTemplate("{% for m in messages %}{% endfor %}", {}).render(USER, add_generation_prompt=True, budget=budget)


GROW = "{% set ns = namespace(x='a') %}{% for i in range(99) %}"


@pytest.mark.parametrize(
    "growing",
    [
        GROW + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
        GROW + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        GROW + "{% set ns.x = ns.x * 100 %}{% endfor %}",
        GROW + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
        GROW + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ [1] * 10 ** 10 }}",
        "{{ 9 ** 99999 ** 2 }}",
        "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    ],
)
def test_a_template_that_grows_without_end_is_stopped(growing: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"stopped: .* too (long|large)") as caught:
        ChatTemplate(growing, {}).render(USER, add_generation_prompt=True)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "escape",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__ }}",
        "{{ '' | attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ self.__init__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ [''] | map(attribute='__class__') | join }}",
    ],
)
def test_private_attributes_are_as_if_they_were_not_there(escape: str) -> None:
    assert ChatTemplate(escape, {}).render(USER, add_generation_prompt=True) == ""


@pytest.mark.parametrize(
    "refusing",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.nothing.more }}",
        "{% macro r() %}{{ r() }}{% endmacro %}{{ r() }}",
        "{{ nothing() }}",
        "{{ raise_exception('x' * 100000) }}",
        "{{ raise_exception('\\ud800') }}",
        "{{ '\\ud800' }}",
    ],
)
def test_whatever_a_template_trips_over_is_an_error_of_the_messages(refusing: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidArgumentError) as caught:
        ChatTemplate(refusing, {}).render(messages, add_generation_prompt=True)
    assert caught.value.field == "messages"
    assert 0 < len(caught.value.message.encode()) < 1000
    assert messages == USER


def test_a_source_that_cannot_be_compiled_is_refused_with_its_file() -> None:
    with pytest.raises(ConfigError, match=r"x\.jinja: .* line 2"):
        ChatTemplate("ok\n{% endfor %}", {}, "x.jinja")
    with pytest.raises(ConfigError, match=r"x\.jinja"):
        ChatTemplate("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", {}, "x.jinja")


def test_the_demo_models_template_takes_messages_without_content(demo: LoadedTokenizer) -> None:
    assert demo.chat_template is not None
    template = ChatTemplate(demo.chat_template, demo.special_tokens)
    text = template.render([{"role": "assistant", "content": None}], add_generation_prompt=False)
    assert text == "<bos><start_of_turn>model\n<end_of_turn>\n"
    ids = demo.tokenizer.encode(text, add_special_tokens=False).ids
    assert ids.count(demo.bos_token_id) == 1


def test_system_messages_of_the_demo_model_go_with_the_next_turn_of_the_users(demo: LoadedTokenizer) -> None:
    assert demo.chat_template is not None
    template = ChatTemplate(demo.chat_template, demo.special_tokens)

    def turns(*given: tuple[str, str]) -> str:
        messages = [{"role": role, "content": content} for role, content in given]
        text = template.render(messages, add_generation_prompt=True)
        return text.removeprefix("<bos>").replace("<start_of_turn>", "<").replace("<end_of_turn>\n", ">")

    brief, kind, hi = ("system", "Be brief."), ("system", "Be kind."), ("user", "Hi")
    assert turns(brief, kind, hi) == "<user\nBe brief.\n\nBe kind.\n\nHi><model\n"
    assert turns(hi, brief, hi) == "<user\nHi><user\nBe brief.\n\nHi><model\n"
    assert turns(brief) == "<user\nBe brief.><model\n"
    assert turns(brief, ("assistant", "Hm"), hi) == "<user\nBe brief.><model\nHm><user\nHi><model\n"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}", "[Hi][]"),
        ("{% for m in messages %}{{ '</think>' in m.content }} {% endfor %}", "False False "),
        ("{% for m in messages %}{{ m.content.split('i')[0] }}.{% endfor %}", "H.."),
        ("{% for m in messages %}{{ m.content is none }} {% endfor %}", "False True "),  # those that can tell are told
    ],
)
def test_content_that_is_not_there_is_empty_to_templates_that_look_into_it(template: str, text: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatTemplate(template, {}).render(messages, add_generation_prompt=False) == text
