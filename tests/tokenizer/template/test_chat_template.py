import pytest

from sapwood_common.errors import ConfigError, InvalidArgumentError
from sapwood_tokenizer.template.chat_template import ChatTemplate, Form
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
    for branches in (
        4000,
        10_000,
    ):  # Python's compiler says of some RecursionError, and of more MemoryError without a word
        with pytest.raises(ConfigError, match=r"x\.jinja: the chat template cannot be compiled: \w"):
            ChatTemplate("{% if a %}x" + "{% elif a %}y" * branches + "{% endif %}", {}, "x.jinja")


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


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "[Hi][]"),
        ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "[Hi][]"),
        ("{% for m in messages %}[{{ m['content'] ~ '' }}]{% endfor %}", "[Hi][]"),
        ("{% for m in messages %}[{{ m.content | string | upper }}]{% endfor %}", "[HI][]"),
        ("{% for m in messages %}[{{ '%s' | format(m.content) }}]{% endfor %}", "[Hi][]"),
        ("{% for m in messages %}[{{ [m.content, '!'] | join }}]{% endfor %}", "[Hi!][!]"),
        ("{% for m in messages %}[{{ m.content or 'nothing' }}]{% endfor %}", "[Hi][nothing]"),
        ("{% for m in messages %}[{{ m.content == none }}]{% endfor %}", "[False][True]"),
        ("{% for m in messages %}[{% if m.content is not none %}{{ m.content }}{% endif %}]{% endfor %}", "[Hi][]"),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", '"Hi"null'),
        ("{% for m in messages %}{{ {'c': m.content} | tojson }}{% endfor %}", '{"c": "Hi"}{"c": null}'),
        ("{% for m in messages %}{{ m.content is string }} {% endfor %}", "True False "),
    ],
)
def test_content_that_is_not_there_is_never_written_as_none(template: str, text: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert ChatTemplate(template, {}).render(messages, add_generation_prompt=False) == text


IN_PLACE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
LAST_ONE_WINS = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}{% endif %}"
    "{% endfor %}{{ ns.s }}{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DROPPED = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
LATE = [
    {"role": "user", "content": "Hi"},
    {"role": "system", "content": "Be brief."},
    {"role": "assistant", "content": "Yes"},
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Bye"},
]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (IN_PLACE, "<user>Hi<system>Be brief.<assistant>Yes<system>Be kind.<user>Bye"),
        (FIRST_ONLY, "<system>Be brief.\n\nBe kind.<user>Hi<assistant>Yes<user>Bye"),
        (LAST_ONE_WINS, "Be brief.\n\nBe kind.<user>Hi<assistant>Yes<user>Bye"),
        (DROPPED, "Be brief.\n\nBe kind.<user>Hi<assistant>Yes<user>Bye"),
    ],
)
def test_late_system_messages_are_shown_where_the_template_takes_them(template: str, text: str) -> None:
    made = ChatTemplate(template, {})
    form = made.probe()
    assert made.render(LATE, add_generation_prompt=False, form=form) == text
    assert made.render(LATE[:1], add_generation_prompt=False, form=form) == "<user>Hi"


OF_TEXT = "{% for m in messages %}{{ m.content }}|{% endfor %}"
OF_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}{% endif %}|{% endfor %}"
)


@pytest.mark.parametrize(("template", "text"), [(OF_TEXT, "one\ntwo|Yes|"), (OF_PARTS, "<one><two>|Yes|")])
def test_texts_of_a_message_are_joined_by_lines_unless_the_template_takes_lists(template: str, text: str) -> None:
    made = ChatTemplate(template, {})
    messages = [{"role": "user", "content": ["one", "two"]}, {"role": "assistant", "content": "Yes"}]
    assert made.render(messages, add_generation_prompt=False, form=made.probe()) == text
    continued = [messages[1], {"role": "assistant", "content": ["one", "two"]}]
    text = made.render(continued, add_generation_prompt=False, continue_final_message=True, form=Form(parts=True))
    assert text == "Yes|one\ntwo"


def test_a_template_tells_its_variables() -> None:
    source = (
        "{% if enable_thinking is defined and not enable_thinking %}{% set thinks = false %}{% endif %}{{ bos_token }}"
        "{% if date_string is not defined %}{% set date_string = strftime_now('%Y') %}{% endif %}{% set tools = tools %}"
        "{% for m in messages %}{{ m }}{{ loop.index }}{% endfor %}{% macro f(x) %}{{ x }}{% endmacro %}{{ f(1) }}"
    )
    found = set(ChatTemplate(source, {"bos_token": "<s>"}).variables)
    assert found >= {"date_string", "enable_thinking"}
    assert not found & {"bos_token", "messages", "tools", "m", "x", "f", "loop", "strftime_now"}


def test_nothing_of_a_template_is_computed_when_it_is_compiled() -> None:
    made = ChatTemplate("{{ 1 // 0 }}{{ 'x' | center(3) }}{{ '%1000000d' % 1 }}{% set x = 2 ** 99 %}", {})
    assert "1000000" in made._template.environment.compile("{{ '%1000000d' % 1 }}", raw=True)
    with pytest.raises(InvalidArgumentError, match="division"):
        made.render(USER, add_generation_prompt=False)
