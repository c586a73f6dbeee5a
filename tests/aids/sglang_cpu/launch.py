"""How to start a real SGLang on a machine without CUDA: the environment and the arguments."""

import importlib.util
import os
import pkgutil
from pathlib import Path

HERE = Path(__file__).parent


def environment(python_path=(), ranks=1):
    """The variables for a CPU engine with `ranks` processes; `python_path` goes behind the stand-in kernels."""
    path = [str(HERE), *map(str, python_path)]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    variables = {
        "PYTHONPATH": os.pathsep.join(path),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_NCCL_SO_PATH": "none",  # else the NCCL that is installed wants a GPU with more than one rank
        "OMP_NUM_THREADS": "2" if ranks == 1 else "1",
        "OMP_WAIT_POLICY": "passive",
    }
    if ranks > 1:  # SGLang insists on one entry a rank; without its kernels it binds nothing
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * ranks)
    return {**os.environ, **variables}


def only_models(python_site, *names):
    """A variable that keeps SGLang from importing all its model files, which takes most of a start.

    Args:
        python_site: The `site-packages` that SGLang is installed in; None for this interpreter's.
        names: The files that stay, e.g. `"qwen2"`.
    """
    if python_site is None:
        spec = importlib.util.find_spec("sglang")
        folder = Path(next(iter(spec.submodule_search_locations)))
    else:
        folder = Path(python_site, "sglang")
    modules = {module.name for module in pkgutil.iter_modules([str(folder / "srt" / "models")]) if not module.ispkg}
    return {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(modules - set(names)))}


def engine_arguments(model, **options):
    """`sglang.Engine`'s keywords for a tiny engine; `server_arguments` gives the same for the command line."""
    return {
        "model_path": str(model),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": True,
        "skip_tokenizer_init": True,
        "max_total_tokens": 2048,
        "log_level": "warning",
        **options,
    }


def server_arguments(model, port, **options):
    arguments = []
    for name, value in engine_arguments(model, port=port, host="127.0.0.1", **options).items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif value is not False and value is not None:
            arguments += [flag, str(value)]
    return arguments
