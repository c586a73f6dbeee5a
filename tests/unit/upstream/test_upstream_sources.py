import pytest

from integration.upstream import sources


def test_files_about_the_package_are_taken_whole_and_others_that_call_it_by_name(tmp_path):
    texts = {
        "tests/entrypoints/rl/test_a.py": "",
        "tests/model_executor/test_sleep_of_all.py": "",
        "tests/distributed/test_weight_transfer_new.py": "",
        "tests/v1/test_engine.py": "llm.sleep(level=1)",
        "tests/v1/test_time.py": "time.sleep(1)",
        "tests/rocm/test_sleep.py": "llm.sleep(level=1)",
        "tests/v1/helper.py": "llm.sleep(level=1)",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert {file.path: bool(file.named) for file in sources.vllm_files(tmp_path)} == {
        "tests/entrypoints/rl/test_a.py": False,
        "tests/model_executor/test_sleep_of_all.py": False,
        "tests/distributed/test_weight_transfer_new.py": False,
        "tests/v1/test_engine.py": True,
    }


def test_a_folder_that_is_no_checkout_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="checkout of SGLang"):
        list(sources.sglang_files(tmp_path))
