"""What the hub's children find in their environment."""

from headrace.engine.hub.actors import allocator_environment


def test_a_learner_gives_freed_memory_back_unless_the_user_has_set_the_allocator_otherwise() -> None:
    assert allocator_environment({})["MALLOC_MMAP_THRESHOLD_"] == "1048576"
    set_by_user = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    assert allocator_environment(set_by_user).keys() == {"MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_"}
