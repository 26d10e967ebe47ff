"""The main path: what happens to jobs that nothing goes wrong with, and to bad ones among them."""

from pipeline import Pipeline

from headrace.schemas import JobState


def test_every_job_ends_once_in_the_table_and_on_the_results_topic(line: Pipeline) -> None:
    worker = line.start_worker()
    tiers = ("interactive", "standard", "bulk")
    ids = {line.submit(f"prompt {n}", tiers[n % 3], batch_id="b", custom_id=str(n)): n for n in range(300)}

    line.wait_terminal(300)
    results = line.results(300)
    worker.close()

    assert line.rows() == dict.fromkeys(ids, "succeeded")
    assert results.keys() == ids.keys()
    for id, number in ids.items():
        (result,) = results[id]
        assert result.state is JobState.SUCCEEDED
        assert result.choices[0].text == f"echo: prompt {number}"
        assert (result.batch_id, result.custom_id, result.run, result.attempt) == ("b", str(number), 1, 1)
    assert sum(map(line.lag, tiers)) == 0
    assert line.query("SELECT count(*) FROM attempts WHERE ended_at IS NULL") == [(0,)]
