"""Every property, by name."""

from __future__ import annotations

from experiments.search_properties.answers import (
    infeasible_exactly_where_no_plan_fits,
    the_papers_optimum_is_certified,
    the_papers_optimum_of_real_models_is_certified,
    what_is_printed_is_what_was_judged,
    what_the_user_is_told_is_what_was_chosen,
)
from experiments.search_properties.asking import Check
from experiments.search_properties.more_never_hurts import (
    a_faster_network_is_never_slower,
    an_idle_device_is_never_slower,
    faster_devices_are_never_slower,
    faster_links_are_never_slower,
    more_memory_is_never_slower,
)
from experiments.search_properties.never_slower import (
    a_constraint_is_never_faster,
    enumeration_finds_nothing_faster,
    no_family_is_faster,
    no_plan_by_hand_is_faster,
    no_row_beside_it_is_faster,
)
from experiments.search_properties.not_mattering import (
    all_costs_scale_the_answer,
    names_do_not_matter,
    the_order_of_equal_devices_and_of_links_does_not_matter,
    the_same_question_has_the_same_answer,
)

PROPERTIES: dict[str, Check] = {
    check.__name__: check
    for check in (
        no_family_is_faster,
        no_row_beside_it_is_faster,
        no_plan_by_hand_is_faster,
        a_constraint_is_never_faster,
        enumeration_finds_nothing_faster,
        more_memory_is_never_slower,
        faster_links_are_never_slower,
        a_faster_network_is_never_slower,
        faster_devices_are_never_slower,
        an_idle_device_is_never_slower,
        names_do_not_matter,
        the_order_of_equal_devices_and_of_links_does_not_matter,
        all_costs_scale_the_answer,
        the_same_question_has_the_same_answer,
        infeasible_exactly_where_no_plan_fits,
        what_is_printed_is_what_was_judged,
        what_the_user_is_told_is_what_was_chosen,
        the_papers_optimum_is_certified,
        the_papers_optimum_of_real_models_is_certified,
    )
}
