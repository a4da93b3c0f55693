"""Prompts of a LLaVA."""

# Of LLaVA 1.5, of its evaluation on ScienceQA.
SCIENCEQA_PROMPT = (
    "USER: {image}{question}\nAnswer with the option's letter from the given choices directly. ASSISTANT:"
)


def check_prompt(prompt: str):
    """Raise a ValueError unless a prompt has places for an image and a question, and no others."""
    if "{image}" not in prompt or "{question}" not in prompt:
        raise ValueError(f"--prompt is {prompt!r}, expected {{image}} and {{question}} in it.")
    try:
        prompt.format(image="", question="")
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(
            f"--prompt is {prompt!r}, expected no braces but {{image}} and {{question}} "
            f"({type(error).__name__}: {error})."
        ) from error
