"""Uses a running server with OpenAI's own client, as its users would. Ends with an assertion error when anything is off.

Usage: openai_client.py BASE_URL API_KEY MODEL
"""

import asyncio
import sys

import openai

BASE_URL, API_KEY, MODEL = sys.argv[1:4]
CONCURRENT = 64
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


def client(**options):
    return openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0, timeout=300, **options)


def ask(model, temperature=0, **options):
    return model.chat.completions.create(model=MODEL, messages=QUESTION, temperature=temperature, **options)


def blocking():
    with client() as model:
        assert [entry.id for entry in model.models.list()] == [MODEL]
        assert model.models.retrieve(MODEL).id == MODEL

        whole = ask(model)
        assert whole.choices[0].message.content == ANSWER, whole
        assert whole.choices[0].message.role == "assistant"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        assert whole.object == "chat.completion" and whole.model == MODEL

        again = ask(model, logprobs=True, top_logprobs=2, max_completion_tokens=3)
        assert again.choices[0].finish_reason == "length"
        assert [entry.token for entry in again.choices[0].logprobs.content] == ["The", " capital", " of"]
        assert all(len(entry.top_logprobs) == 2 for entry in again.choices[0].logprobs.content)
        assert again.usage.prompt_tokens_details.cached_tokens > 0
        assert again.usage.prompt_tokens == whole.usage.prompt_tokens

        stopped = ask(model, stop=[" France"])
        assert stopped.choices[0].message.content == "The capital of"

        two = ask(model, n=2)
        assert [choice.message.content for choice in two.choices] == [ANSWER, ANSWER]

        text = model.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=1, temperature=0, logprobs=1)
        assert text.choices[0].text == " Paris" and text.choices[0].logprobs.tokens == [" Paris"]

        raw = model.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION, max_tokens=1)
        assert raw.headers["x-request-id"].startswith("req_")
    return whole


def streaming(whole):
    with client() as model:
        chunks = list(ask(model, stream=True, stream_options={"include_usage": True}))
        deltas = [choice.delta.content for chunk in chunks for choice in chunk.choices]
        assert "".join(delta or "" for delta in deltas) == ANSWER, deltas
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert len({chunk.id for chunk in chunks}) == 1

        # A reader that has seen enough.
        with ask(model, stream=True) as stream:
            for chunk in stream:
                if chunk.choices[0].delta.content:
                    break

        texts = model.completions.create(model=MODEL, prompt="1 2 3 4 5", max_tokens=4, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in texts).startswith(" 6")


def refusals():
    with client() as model:
        for error, options in [
            (openai.BadRequestError, {"temperature": -1}),
            (openai.BadRequestError, {"extra_body": {"guided_json": {}}}),
            (openai.BadRequestError, {"response_format": {"type": "json_object"}}),
            (openai.BadRequestError, {"logit_bias": {"999999": 1}}),
        ]:
            try:
                ask(model, **options)
            except error as refusal:
                assert refusal.type == "invalid_request_error" and refusal.param, refusal
            else:
                raise AssertionError(f"{options} was not refused")
        try:
            model.chat.completions.create(model="no-such-model", messages=QUESTION)
        except openai.NotFoundError as refusal:
            assert refusal.code == "model_not_found"
        else:
            raise AssertionError("an unknown model was not refused")
    with openai.OpenAI(base_url=BASE_URL, api_key="wrong", max_retries=0) as stranger:
        try:
            stranger.models.list()
        except openai.AuthenticationError:
            pass
        else:
            raise AssertionError("a wrong key was not refused")


async def concurrent():
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0, timeout=300) as model:

        async def whole():
            answer = await ask(model)
            return answer.choices[0].message.content

        async def streamed():
            stream = await ask(model, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*(whole() if index % 2 else streamed() for index in range(CONCURRENT)))
        assert answers == [ANSWER] * CONCURRENT, set(answers)


streaming(blocking())
refusals()
asyncio.run(concurrent())
print("all well")
