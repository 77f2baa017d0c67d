//! Which rows the next step has: one for every running answer, and prompts in the room that is left.
//!
//! Pure: it sees numbers and gives numbers. Every running answer gets its row in every step, so that
//! no prompt can starve it. Prompts of one priority share the rest evenly, oldest first, so that a long
//! one cannot keep short ones waiting; more urgent ones are served first, but leave a quarter of the
//! rows to the others. While answers run, less room is given to prompts: their tokens come late by the
//! time of one step.

/// Bounds of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Most rows of a step.
    pub rows: usize,
    /// Most rows of prompts in a step that also has running answers.
    pub prefill_rows_beside_decode: usize,
}

/// Rows of a step where neither the operator nor the backend says.
const ROWS: usize = 512;
/// Least share of prompts beside running answers where nobody says.
const ROWS_BESIDE_DECODE: usize = 128;

/// Bounds of a step as they were asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AskedBudget {
    /// Most rows of a step.
    pub rows: Option<usize>,
    /// Most rows of prompts in a step that also has running answers.
    pub prefill_rows_beside_decode: Option<usize>,
}

impl AskedBudget {
    /// With what was not asked for as a backend prefers it that is busy with so many rows.
    pub fn or(self, preferred_rows: Option<usize>) -> Budget {
        let preferred = preferred_rows.unwrap_or(ROWS).max(1);
        let rows = self.rows.unwrap_or(preferred);
        let beside = self.prefill_rows_beside_decode;
        let beside = beside.unwrap_or((preferred / 4).max(ROWS_BESIDE_DECODE));
        Budget {
            rows,
            prefill_rows_beside_decode: beside.min(rows),
        }
    }
}

impl From<Budget> for AskedBudget {
    fn from(budget: Budget) -> Self {
        Self {
            rows: Some(budget.rows),
            prefill_rows_beside_decode: Some(budget.prefill_rows_beside_decode),
        }
    }
}

/// What one request needs next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// The row of its last token.
    Decode,
    /// So many tokens of its prompt.
    Prefill(usize),
}

/// A request in the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demand {
    /// What it needs.
    pub need: Need,
    /// Lower is more urgent.
    pub priority: i32,
}

struct Prompt {
    index: usize,
    tokens: usize,
    priority: i32,
}

/// Rows of every request, in the order given; 0 leaves it out.
pub fn plan(demands: &[Demand], budget: Budget) -> Vec<usize> {
    let mut rows = vec![0; demands.len()];
    let mut left = budget.rows;
    for (rows, demand) in rows.iter_mut().zip(demands) {
        if demand.need == Need::Decode && left > 0 {
            *rows = 1;
            left -= 1;
        }
    }
    if left < budget.rows {
        left = left.min(budget.prefill_rows_beside_decode);
    }
    let mut prompts: Vec<Prompt> = demands
        .iter()
        .enumerate()
        .filter_map(|(index, demand)| match demand.need {
            Need::Prefill(tokens) if tokens > 0 => Some(Prompt {
                index,
                tokens,
                priority: demand.priority,
            }),
            _ => None,
        })
        .collect();
    // Those that need least are served first with an even share, so that what they leave goes to
    // the others; ties go to the older.
    prompts.sort_by_key(|prompt| (prompt.priority, prompt.tokens, prompt.index));
    let classes: Vec<&[Prompt]> = prompts.chunk_by(|a, b| a.priority == b.priority).collect();
    for (behind, class) in classes
        .iter()
        .enumerate()
        .map(|(i, c)| (classes.len() - 1 - i, c))
    {
        let mut room = if behind > 0 { left - left / 4 } else { left };
        for (served, prompt) in class.iter().enumerate() {
            let share = room.div_ceil(class.len() - served).min(room);
            let given = prompt.tokens.min(share);
            if let Some(rows) = rows.get_mut(prompt.index) {
                *rows = given;
            }
            room -= given;
            left -= given;
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BUDGET: Budget = Budget {
        rows: 512,
        prefill_rows_beside_decode: 128,
    };

    fn equal(needs: &[Need]) -> Vec<Demand> {
        let demand = |need: &Need| Demand {
            need: *need,
            priority: 0,
        };
        needs.iter().map(demand).collect()
    }

    #[test]
    fn what_is_asked_for_goes_before_what_the_backend_prefers() {
        let of = |rows, beside, preferred| {
            let asked = AskedBudget {
                rows,
                prefill_rows_beside_decode: beside,
            };
            let budget = asked.or(preferred);
            (budget.rows, budget.prefill_rows_beside_decode)
        };
        assert_eq!(of(None, None, None), (512, 128));
        assert_eq!(of(None, None, Some(2048)), (2048, 512));
        assert_eq!(of(None, None, Some(64)), (64, 64));
        assert_eq!(of(Some(300), None, Some(2048)), (300, 300));
        assert_eq!(of(Some(300), Some(40), Some(2048)), (300, 40));
        assert_eq!(of(None, Some(4096), Some(2048)), (2048, 2048));
        assert_eq!(AskedBudget::from(BUDGET).or(Some(2048)), BUDGET);
    }

    #[test]
    fn a_long_prompt_does_not_hold_up_short_ones_or_answers() {
        let needs = [
            Need::Prefill(8000),
            Need::Decode,
            Need::Prefill(10),
            Need::Decode,
            Need::Prefill(20),
        ];
        assert_eq!(plan(&equal(&needs), BUDGET), [98, 1, 10, 1, 20]);
    }

    #[test]
    fn a_prompt_alone_gets_the_whole_step() {
        assert_eq!(plan(&equal(&[Need::Prefill(8000)]), BUDGET), [512]);
        assert_eq!(plan(&equal(&[Need::Prefill(3)]), BUDGET), [3]);
    }

    #[test]
    fn urgent_prompts_go_first_and_leave_a_quarter() {
        let demand = |tokens, priority| Demand {
            need: Need::Prefill(tokens),
            priority,
        };
        let demands = [
            demand(8000, 3),
            demand(8000, -2),
            demand(8000, 3),
            demand(8000, 7),
        ];
        assert_eq!(plan(&demands, BUDGET), [48, 384, 48, 32]);
        let demands = [demand(8000, 3), demand(12, -2)];
        assert_eq!(plan(&demands, BUDGET), [500, 12]);
    }

    proptest! {
        #[test]
        fn steps_keep_their_bounds_and_make_progress(
            needs in proptest::collection::vec((prop_oneof![Just(Need::Decode), (1usize..3000).prop_map(Need::Prefill)], -2i32..3), 1..600)
        ) {
            let demands: Vec<Demand> = needs.iter().map(|(need, priority)| Demand { need: *need, priority: *priority }).collect();
            let rows = plan(&demands, BUDGET);
            prop_assert!(rows.iter().sum::<usize>() <= BUDGET.rows);
            prop_assert!(rows.iter().sum::<usize>() > 0);
            let decodes = demands.iter().filter(|demand| demand.need == Need::Decode).count();
            for (demand, rows) in demands.iter().zip(&rows) {
                match demand.need {
                    Need::Decode => prop_assert!(*rows == 1 || decodes > BUDGET.rows),
                    Need::Prefill(tokens) => prop_assert!(*rows <= tokens),
                }
            }
        }

        #[test]
        fn every_priority_gets_rows(priorities in proptest::collection::vec(0i32..6, 1..6)) {
            let demands: Vec<Demand> = priorities.iter().map(|priority| Demand { need: Need::Prefill(9000), priority: *priority }).collect();
            let rows = plan(&demands, BUDGET);
            for priority in &priorities {
                let of_class = demands.iter().zip(&rows).filter(|(demand, _)| demand.priority == *priority);
                prop_assert!(of_class.map(|(_, rows)| *rows).sum::<usize>() > 0);
            }
        }
    }
}
