"""A run's folder continues the run that it is of, and no other."""

import pytest

from nemo_like.algorithms.run_folder import save_config
from nemo_like.config.run_schema import RunConfig
from nemo_like.config.sampling_run_schema import GRPORunConfig
from nemo_like.config.text_run_schema import SFTRunConfig
from nemo_like.errors import UserError


def test_a_folder_is_continued_by_the_algorithm_that_began_it(tmp_path):
    save_config(tmp_path, GRPORunConfig(), continued=False)
    save_config(tmp_path, GRPORunConfig(), continued=True)
    other = SFTRunConfig(run=RunConfig(dir="x"))
    with pytest.raises(UserError, match=r"run\.dir=x is .* of another kind: .* no section sft; "):
        save_config(tmp_path, other, continued=True)


@pytest.mark.parametrize("content", ["", "run: {", "- a", "\ud800"])
def test_a_damaged_configuration_is_named(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"config\.yaml is damaged, .*; restore it, or remove it"):
        save_config(tmp_path, GRPORunConfig(), continued=True)
    (tmp_path / "config.yaml").unlink()
    save_config(tmp_path, GRPORunConfig(), continued=True)
