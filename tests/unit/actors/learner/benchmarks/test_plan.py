from headrace.actors.learner.benchmarks.plan import figures


def test_the_planner_reaches_what_the_documentation_says() -> None:
    measured = figures()
    assert measured["token_budget_use"] >= 0.96
    assert measured["rank_max_over_mean"] <= 1.01
    assert measured["rank_max_over_mean_whole_groups"] <= 1.05
    assert measured["plan_ms_8k"] < 100
    assert measured["token_budget_use"] > measured["first_come_token_budget_use"]
    assert measured["rank_max_over_mean"] < measured["first_come_rank_max_over_mean"]
    assert 1.0 <= measured["prompt_copies_per_group_shared"] < 1.2 < 4 < measured["prompt_copies_per_group"]
