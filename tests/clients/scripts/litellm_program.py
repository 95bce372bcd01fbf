"""A program through LiteLLM's library: ``litellm_program.py http://127.0.0.1:8000``. Prints what it gave, and what by HTTP."""

import json
import sys

import sapwood.lang as sl


@sl.function
def talk(s: sl.State, question: str) -> None:
    """Two turns."""
    s += sl.system("Be brief.")
    s += sl.user(question) + sl.assistant(sl.gen("first", 6))
    s += sl.user("And?") + sl.assistant(sl.gen("second", 6))


@sl.function
def begun(s: sl.State) -> None:
    """A turn that LiteLLM cannot continue."""
    s += sl.user("Hi") + sl.assistant("Well," + sl.gen("x"))


url = sys.argv[1]
litellm = sl.LiteLLM("openai/demo", api_base=f"{url}/v1", api_key="none")
states = [talk.run("Hello", backend=each, temperature=0) for each in (litellm, sl.SapwoodHttp(url))]
streamed = talk.run("Hello", backend=litellm, temperature=0, stream=True)
pieces = list(streamed.text_iter("first"))
assert "".join(pieces) == states[0]["first"]
assert states[0].get_meta_info("first")["prompt_tokens"] == states[1].get_meta_info("first")["prompt_tokens"]
for program, why in ((begun, "an assistant's turn"), (sl.function(lambda s: s.__iadd__(sl.gen("x"))), "text outside")):
    try:
        program.run(backend=litellm)
    except sl.UnsupportedError as error:
        assert why in str(error), error
    else:
        raise AssertionError(why)
print(json.dumps([[state["first"], state["second"]] for state in states]))
