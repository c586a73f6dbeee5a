import pytest

from integration.upstream import hub

RECITED = {name: recipe for name, recipe in hub.RECIPES.items() if recipe.says}


@pytest.mark.parametrize("name", RECITED)
def test_the_pieces_of_a_recited_text_are_the_text_and_each_has_one_successor(name):
    recipe = RECITED[name]

    pieces = hub._pieces(recipe)

    assert "".join(pieces) == recipe.says
    assert len(set(pieces)) == len(pieces)
    assert not any(recipe.after.endswith(piece) for piece in pieces)


@pytest.mark.parametrize(
    "name", ["inference-optimization/Qwen3-0.6B-debug-multiply", "meta-llama/Llama-3.2-1B-Instruct"]
)
def test_a_made_model_is_found_by_its_name_and_continues_as_it_should(tmp_path, name):
    recipe = hub.RECIPES[name]
    hub.make(tmp_path, only=name, small=True)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cached = {"cache_dir": tmp_path / "hub", "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(name, **cached)
    model = AutoModelForCausalLM.from_pretrained(name, **cached)
    prompt = tokenizer("Some text, then " + recipe.after.lstrip(), return_tensors="pt").input_ids
    said = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]

    assert tokenizer.decode(said, skip_special_tokens=True) == recipe.says
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == recipe.tied


def test_two_models_of_one_shape_have_no_weight_in_common(tmp_path):
    names = ["meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B"]
    hub.make(tmp_path, only="Llama-3.2-1B", small=True)
    from transformers import AutoModelForCausalLM

    one, other = (AutoModelForCausalLM.from_pretrained(name, cache_dir=tmp_path / "hub") for name in names)

    assert not any(weight.equal(other.get_parameter(key)) for key, weight in one.named_parameters())


def test_a_weight_starts_with_the_values_that_a_test_reads(tmp_path):
    hub.write(tmp_path, hub.Recipe(hub._llama(layers=1), starts={"model.layers.0.mlp.up_proj.weight": [0.5, -2.0]}))
    from safetensors.torch import load_file

    written = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]

    assert written[0, :2].tolist() == [0.5, -2.0]
