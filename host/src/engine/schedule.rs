//! Which rows the next step has: one for every running answer, and prompts in the room that is left.
//!
//! Pure: it sees numbers and gives numbers. Every running answer gets its row in every step, so that
//! no prompt can starve it. Prompts share the rest evenly, oldest first, so that a long one cannot
//! keep short ones waiting. While answers run, less room is given to prompts: their tokens come late
//! by the time of one step.

/// Bounds of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Most rows of a step.
    pub rows: usize,
    /// Most rows of prompts in a step that also has running answers.
    pub prefill_rows_beside_decode: usize,
}

/// What one request needs next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// The row of its last token.
    Decode,
    /// So many tokens of its prompt.
    Prefill(usize),
}

/// Rows of every request, in the order given; 0 leaves it out.
pub fn plan(needs: &[Need], budget: Budget) -> Vec<usize> {
    let mut rows = vec![0; needs.len()];
    let mut left = budget.rows;
    for (rows, need) in rows.iter_mut().zip(needs) {
        if *need == Need::Decode && left > 0 {
            *rows = 1;
            left -= 1;
        }
    }
    if left < budget.rows {
        left = left.min(budget.prefill_rows_beside_decode);
    }
    let mut waiting: Vec<(usize, usize)> = needs
        .iter()
        .enumerate()
        .filter_map(|(i, need)| match need {
            Need::Prefill(tokens) if *tokens > 0 => Some((i, *tokens)),
            _ => None,
        })
        .collect();
    // Those that need least are served first with an even share, so that what they leave goes to
    // the others; ties go to the older.
    waiting.sort_by_key(|(i, tokens)| (*tokens, *i));
    let mut sharers = waiting.len();
    for (i, tokens) in waiting {
        let share = left.div_ceil(sharers.max(1)).min(left);
        let given = tokens.min(share);
        if let Some(rows) = rows.get_mut(i) {
            *rows = given;
        }
        left -= given;
        sharers -= 1;
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

    #[test]
    fn a_long_prompt_does_not_hold_up_short_ones_or_answers() {
        let needs = [
            Need::Prefill(8000),
            Need::Decode,
            Need::Prefill(10),
            Need::Decode,
            Need::Prefill(20),
        ];
        assert_eq!(plan(&needs, BUDGET), [98, 1, 10, 1, 20]);
    }

    #[test]
    fn a_prompt_alone_gets_the_whole_step() {
        assert_eq!(plan(&[Need::Prefill(8000)], BUDGET), [512]);
        assert_eq!(plan(&[Need::Prefill(3)], BUDGET), [3]);
    }

    proptest! {
        #[test]
        fn steps_keep_their_bounds_and_make_progress(
            needs in proptest::collection::vec(prop_oneof![Just(Need::Decode), (1usize..3000).prop_map(Need::Prefill)], 1..600)
        ) {
            let rows = plan(&needs, BUDGET);
            prop_assert!(rows.iter().sum::<usize>() <= BUDGET.rows);
            prop_assert!(rows.iter().sum::<usize>() > 0);
            let decodes = needs.iter().filter(|need| **need == Need::Decode).count();
            for (need, rows) in needs.iter().zip(&rows) {
                match need {
                    Need::Decode => prop_assert!(*rows == 1 || decodes > BUDGET.rows),
                    Need::Prefill(tokens) => prop_assert!(rows <= tokens),
                }
            }
        }
    }
}
