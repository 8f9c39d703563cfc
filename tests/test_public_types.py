"""The user's file that `make lint` checks in pyright's strict mode runs too: what it says of types is so."""

from tests.strict import users_file


def test_posteriors(tmp_path):
    users_file.posteriors(tmp_path)


def test_a_loop_of_ones_own():
    users_file.own_loop()


def test_log_densities_and_choices(tmp_path):
    users_file.log_densities(tmp_path)
    assert len(users_file.choices()) == 5
