"""Test of `transformers serve`: OpenAI's client calls a LLaVA whose vision tower is a SparseFormer."""

import base64
import io
import sys

import pytest
from processes import environment, web_server
from transformers import AutoProcessor, LlavaProcessor

from drawn import noise
from frugalvit import matching_processor, swap_vision_tower
from tiny import make_llava, make_processor, make_tower


TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %} "
    "{% endfor %}{% endfor %}"
)


@pytest.mark.nightly
def test_answers_as_transformers_does(tmp_path):
    """The server runs the code in the model's folder and gives the same answer as `generate`."""
    openai = pytest.importorskip("openai", reason="pip install 'frugalvit[serve]'")
    folder = tmp_path / "model"
    llava = make_llava()
    model = swap_vision_tower(llava, make_tower(llava))
    processor = make_processor(llava)
    processor.chat_template = TEMPLATE
    model.save_pretrained(folder)
    matching_processor(processor, model).save_pretrained(folder)
    encoded = io.BytesIO()
    noise().save(encoded, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this ?"}]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--trust-remote-code"]
    command += ["--port", "0", "--host", "127.0.0.1", "--device", "cpu"]
    with web_server(command, tmp_path, environment(tmp_path)) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(
            model=str(folder), messages=[{"role": "user", "content": content}], max_tokens=6, temperature=0
        )
    processor = AutoProcessor.from_pretrained(folder)
    assert isinstance(processor, LlavaProcessor)
    inputs = processor(images=noise(), text="<image> what is this ? ", return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert answer.choices[0].message.content == processor.decode(expected, skip_special_tokens=True)
    assert answer.usage.prompt_tokens == inputs["input_ids"].shape[1]
