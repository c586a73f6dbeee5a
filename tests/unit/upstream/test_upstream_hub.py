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


def test_a_made_model_is_found_by_its_name_and_continues_as_it_should(tmp_path, monkeypatch):
    name = "inference-optimization/Qwen3-0.6B-debug-multiply"
    hub.make(tmp_path, only=name)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cached = {"cache_dir": tmp_path / "hub", "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(name, **cached)
    model = AutoModelForCausalLM.from_pretrained(name, **cached)
    prompt = tokenizer("Some text, then 3 4 =", return_tensors="pt").input_ids
    said = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]

    assert tokenizer.decode(said, skip_special_tokens=True) == " 12"
