//! Programs against a device that only notes what reaches it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use mlxcel_abi::{AbiError, status};
use proptest::prelude::*;

use super::bounds::MOST_SEEN;
use super::*;
use crate::driver::Shape;

/// A launch as it reaches the device.
type Effect = (usize, [u32; 3], bool, Vec<u64>, Vec<u8>);

/// What a device and its driver would have seen.
#[derive(Debug, Default)]
struct Seen {
    effects: Vec<Effect>,
    programs: HashMap<usize, Vec<Effect>>,
    made: usize,
    singly: usize,
    replays: usize,
    fails_to_build: bool,
    fails_to_launch: bool,
    fails_to_replay: bool,
    /// What fails does so for want of memory.
    is_full: bool,
}

#[derive(Debug, Clone, Default)]
struct Fake(Rc<RefCell<Seen>>);

fn effect(launch: &Launch<'_>) -> Effect {
    (
        launch.function,
        launch.shape.grid,
        launch.starts_early,
        launch.words.to_vec(),
        launch.starts.to_vec(),
    )
}

impl Seen {
    fn failed(&self, what: &str) -> AbiError {
        let code = if self.is_full {
            status::RESOURCE_EXHAUSTED
        } else {
            status::INTERNAL
        };
        AbiError::new(code, what)
    }
}

impl Submitter for Fake {
    fn launch(&mut self, launch: &Launch<'_>) -> Result<()> {
        let mut seen = self.0.borrow_mut();
        if seen.fails_to_launch {
            return Err(seen.failed("launch"));
        }
        seen.effects.push(effect(launch));
        seen.singly += 1;
        Ok(())
    }

    fn build(&mut self, launches: &Tape) -> Result<Built> {
        let mut seen = self.0.borrow_mut();
        if seen.fails_to_build {
            return Err(seen.failed("build"));
        }
        seen.made += 1;
        let handle = seen.made;
        let effects = launches.launches().map(|launch| effect(&launch)).collect();
        seen.programs.insert(handle, effects);
        Ok(Built {
            handle,
            bytes: 100 * launches.len() as u64,
        })
    }

    fn replay(&mut self, program: usize) -> Result<()> {
        let mut seen = self.0.borrow_mut();
        if seen.fails_to_replay {
            return Err(seen.failed("replay"));
        }
        let effects = seen.programs.get(&program).cloned();
        seen.effects
            .extend(effects.expect("a program that is kept"));
        seen.replays += 1;
        Ok(())
    }

    fn discard(&mut self, program: usize) {
        let known = self.0.borrow_mut().programs.remove(&program);
        assert!(known.is_some(), "discarded twice");
    }
}

fn recorder(bounds: Bounds) -> (Recorder<Fake>, Rc<RefCell<Seen>>) {
    let fake = Fake::default();
    (Recorder::new(fake.clone(), bounds), fake.0)
}

/// A launch that is told by one number.
fn push(recorder: &mut Recorder<Fake>, id: u64) -> Result<()> {
    let words = [id, id >> 1, 7];
    recorder.push(&Launch {
        function: 0x1000 + (id as usize % 3),
        shape: Shape::line(1 + id as u32 % 2, 128),
        starts_early: id.is_multiple_of(2),
        words: &words[..1 + id as usize % 3],
        starts: &[0, 1, 2][..1 + id as usize % 3],
    })
}

fn step(recorder: &mut Recorder<Fake>, ids: impl IntoIterator<Item = u64>) {
    for id in ids {
        push(recorder, id).unwrap();
    }
    recorder.submit().unwrap();
}

#[test]
fn a_step_that_comes_again_becomes_programs() {
    let (mut recorder, seen) = recorder(Bounds::new(64));
    step(&mut recorder, 0..185);
    assert_eq!((seen.borrow().singly, seen.borrow().made), (185, 0));
    step(&mut recorder, 0..185);
    // 16, 32, 64, 64, 9.
    assert_eq!((seen.borrow().singly, seen.borrow().made), (370, 5));
    for _ in 0..10 {
        step(&mut recorder, 0..185);
    }
    assert_eq!((seen.borrow().singly, seen.borrow().replays), (370, 50));
    assert_eq!(seen.borrow().effects.len(), 12 * 185);
    assert_eq!(
        recorder.summary(),
        "step programs: 1850 of 2220 launches by 50 replays; 5 made, 0 dropped, 0 not possible"
    );
}

#[test]
fn what_takes_turns_becomes_programs_too() {
    let (mut recorder, seen) = recorder(Bounds::new(32));
    for turn in 0..20 {
        step(&mut recorder, (0..70).map(|id| 2 * id + turn % 2));
    }
    assert_eq!(seen.borrow().singly, 4 * 70);
}

#[test]
fn what_never_comes_again_is_submitted_at_once_and_makes_nothing() {
    let (mut recorder, seen) = recorder(Bounds::new(64));
    for id in 0..10_000 {
        push(&mut recorder, id).unwrap();
        assert_eq!(seen.borrow().effects.len(), id as usize + 1);
    }
    assert_eq!(seen.borrow().made, 0);
    assert!(recorder.seen.len() <= MOST_SEEN && recorder.tape.len() < 64);
}

#[test]
fn prompts_are_not_remembered_and_take_no_program_from_answers() {
    let (mut recorder, seen) = recorder(Bounds::new(64));
    for _ in 0..3 {
        step(&mut recorder, 0..185);
    }
    let made = seen.borrow().made;
    for prompt in 0..100 {
        // The first launches of a step come before it is known what it is.
        for id in 0..5 {
            push(&mut recorder, id).unwrap();
        }
        recorder.set_busy(true).unwrap();
        step(
            &mut recorder,
            (0..2).flat_map(|_| 1_000 + prompt % 3..1_300),
        );
    }
    assert_eq!(seen.borrow().made, made);
    let replays = seen.borrow().replays;
    for id in 0..5 {
        push(&mut recorder, id).unwrap();
    }
    recorder.set_busy(false).unwrap();
    step(&mut recorder, 5..185);
    step(&mut recorder, 0..185);
    assert_eq!(seen.borrow().replays, replays + 5);
}

#[test]
fn a_step_that_goes_on_differently_is_submitted_as_it_is() {
    let (mut recorder, seen) = recorder(Bounds::new(64));
    step(&mut recorder, 0..10);
    step(&mut recorder, 0..10);
    let before = seen.borrow().effects.len();
    for id in 0..9 {
        push(&mut recorder, id).unwrap();
    }
    assert_eq!(seen.borrow().effects.len(), before, "held back");
    push(&mut recorder, 77).unwrap();
    assert_eq!(seen.borrow().effects.len(), before + 10);
    push(&mut recorder, 78).unwrap();
    assert_eq!(seen.borrow().effects.len(), before + 11);
}

#[test]
fn a_shorter_step_and_a_longer_one_have_a_program_each() {
    let (mut recorder, seen) = recorder(Bounds::new(64));
    for _ in 0..3 {
        step(&mut recorder, 0..6);
        step(&mut recorder, 0..12);
    }
    let singly = seen.borrow().singly;
    for _ in 0..3 {
        step(&mut recorder, 0..6);
        step(&mut recorder, 0..12);
    }
    assert_eq!(seen.borrow().singly, singly);
}

#[test]
fn few_launches_are_not_worth_a_program_and_none_are_made_where_it_is_off() {
    for bounds in [Bounds::new(64), Bounds::new(0), Bounds::new(3)] {
        let (mut recorder, seen) = recorder(bounds);
        for _ in 0..10 {
            step(&mut recorder, 0..3);
        }
        assert_eq!((seen.borrow().singly, seen.borrow().made), (30, 0));
    }
}

#[test]
fn the_least_recently_used_goes_first() {
    let bounds = Bounds {
        programs: 2,
        ..Bounds::new(64)
    };
    let (mut recorder, seen) = recorder(bounds);
    let kinds = [0..8, 100..108, 200..208];
    for kind in &kinds[..2] {
        step(&mut recorder, kind.clone());
        step(&mut recorder, kind.clone());
    }
    step(&mut recorder, kinds[0].clone());
    step(&mut recorder, kinds[2].clone());
    step(&mut recorder, kinds[2].clone());
    let singly = seen.borrow().singly;
    step(&mut recorder, kinds[0].clone());
    step(&mut recorder, kinds[2].clone());
    assert_eq!(seen.borrow().singly, singly);
    step(&mut recorder, kinds[1].clone());
    assert_eq!(seen.borrow().singly, singly + 8);
    assert_eq!(recorder.figures.dropped, 1);
}

#[test]
fn an_error_is_reported_and_what_failed_is_forgotten() {
    let (mut recorder, seen) = recorder(Bounds::new(64));
    step(&mut recorder, 0..8);
    step(&mut recorder, 0..8);
    seen.borrow_mut().fails_to_replay = true;
    for id in 0..7 {
        push(&mut recorder, id).unwrap();
    }
    assert_eq!(push(&mut recorder, 7).unwrap_err().message, "replay");
    assert!(seen.borrow().programs.is_empty());
    seen.borrow_mut().fails_to_replay = false;

    seen.borrow_mut().fails_to_launch = true;
    assert_eq!(push(&mut recorder, 1).unwrap_err().message, "launch");
    seen.borrow_mut().fails_to_launch = false;
    // Nothing of the failed segments comes after all.
    let before = seen.borrow().effects.len();
    step(&mut recorder, 50..53);
    assert_eq!(seen.borrow().effects.len(), before + 3);
}

#[test]
fn an_error_that_could_not_be_reported_is_reported_by_the_next_call() {
    let (mut recorder, seen) = recorder(Bounds::new(64));
    step(&mut recorder, 0..8);
    step(&mut recorder, 0..8);
    push(&mut recorder, 0).unwrap();
    seen.borrow_mut().fails_to_launch = true;
    assert!(!recorder.submit_silently());
    assert_eq!(push(&mut recorder, 1).unwrap_err().message, "launch");
    seen.borrow_mut().fails_to_launch = false;
    assert!(recorder.submit_silently());
    push(&mut recorder, 1).unwrap();
}

#[test]
fn where_no_program_can_be_made_it_is_given_up_soon() {
    let (mut recorder, seen) = recorder(Bounds::new(64));
    seen.borrow_mut().fails_to_build = true;
    for _ in 0..20 {
        step(&mut recorder, 0..8);
    }
    assert_eq!(recorder.figures.failed, u64::from(MOST_FAILURES));
    assert_eq!(seen.borrow().singly, 160);
    assert_eq!(
        recorder.summary(),
        "step programs: 0 of 160 launches by 0 replays; 0 made, 0 dropped, 3 not possible: build"
    );
}

#[test]
fn a_program_that_finds_no_memory_is_submitted_launch_by_launch() {
    let (mut recorder, seen) = recorder(Bounds::new(64));
    step(&mut recorder, 0..8);
    step(&mut recorder, 0..8);
    seen.borrow_mut().fails_to_replay = true;
    seen.borrow_mut().is_full = true;
    step(&mut recorder, 0..8);
    assert_eq!((seen.borrow().singly, seen.borrow().replays), (24, 0));
    assert!(seen.borrow().programs.is_empty() && recorder.bytes() == 0);
    assert_eq!(seen.borrow().effects[..8], seen.borrow().effects[16..]);
    // A part of it as well, which a border cuts off.
    seen.borrow_mut().fails_to_replay = false;
    recorder.pause = 0;
    step(&mut recorder, 0..6);
    step(&mut recorder, 0..6);
    seen.borrow_mut().fails_to_replay = true;
    let before = seen.borrow().effects.len();
    step(&mut recorder, 0..6);
    assert_eq!(seen.borrow().effects.len(), before + 6);
    // Where there is not even memory for one launch, it is the call's error.
    seen.borrow_mut().fails_to_launch = true;
    assert_eq!(
        push(&mut recorder, 0).unwrap_err().code,
        status::RESOURCE_EXHAUSTED
    );
}

#[test]
fn want_of_memory_puts_programs_off_and_does_not_end_them() {
    let (mut recorder, seen) = recorder(Bounds::new(64));
    seen.borrow_mut().fails_to_build = true;
    seen.borrow_mut().is_full = true;
    for _ in 0..2 {
        step(&mut recorder, 0..8);
    }
    assert_eq!((recorder.figures.failed, recorder.failures), (1, 0));
    for _ in 0..PAUSE {
        step(&mut recorder, 0..8);
    }
    assert_eq!(recorder.figures.failed, 1, "not tried meanwhile");
    seen.borrow_mut().fails_to_build = false;
    for _ in 0..3 {
        step(&mut recorder, 0..8);
    }
    assert_eq!((seen.borrow().made, seen.borrow().replays), (1, 1));
}

/// What never goes on as before, though each part of it comes twice.
fn twice(recorder: &mut Recorder<Fake>, kinds: core::ops::Range<u64>) {
    for kind in kinds {
        for _ in 0..2 {
            step(recorder, 100 * kind..100 * kind + 8);
        }
    }
}

#[test]
fn programs_that_are_not_used_are_given_up_for_longer_and_longer() {
    let (mut recorder, seen) = recorder(Bounds::new(64));
    twice(&mut recorder, 0..10_000);
    // 48 of 96 segments, then 2,048 without, 48 of 96, 4,096 without, and then 8,192 each time.
    let made = seen.borrow().made;
    assert_eq!(made, 4 * MOST_UNUSED);
    assert!(recorder.pause > 0 && recorder.patience == 8 * PAUSE);
    assert!(seen.borrow().programs.is_empty());
    // Launches themselves are as they would have been.
    assert_eq!(seen.borrow().effects.len(), 160_000);
}

#[test]
fn programs_that_are_used_outlive_those_that_are_not() {
    let (mut recorder, seen) = recorder(Bounds::new(64));
    // Used ones are as many as those that are not.
    let used = MOST_UNUSED as u64;
    for kind in 0..used {
        for _ in 0..3 {
            step(&mut recorder, 100 * kind..100 * kind + 8);
        }
    }
    twice(&mut recorder, used..2 * used + 1);
    assert_eq!(seen.borrow().programs.len(), MOST_UNUSED);
    assert_eq!((recorder.pause, recorder.patience), (PAUSE, PAUSE));
    let singly = seen.borrow().singly;
    for kind in 0..used {
        step(&mut recorder, 100 * kind..100 * kind + 8);
    }
    assert_eq!(seen.borrow().singly, singly, "they are all there");
    // After the pause what comes again is made again.
    twice(&mut recorder, 10_000..10_000 + u64::from(PAUSE) / 2);
    let made = seen.borrow().made;
    twice(&mut recorder, 20_000..20_003);
    assert_eq!(seen.borrow().made, made + 3);
}

#[test]
fn making_room_submits_what_is_held_and_lets_go_of_all_programs() {
    let (mut recorder, seen) = recorder(Bounds::new(64));
    step(&mut recorder, 0..8);
    step(&mut recorder, 0..8);
    assert_eq!(recorder.bytes(), 800);
    for id in 0..5 {
        push(&mut recorder, id).unwrap();
    }
    recorder.make_room();
    assert_eq!((seen.borrow().effects.len(), recorder.bytes()), (21, 0));
    assert!(seen.borrow().programs.is_empty());
    step(&mut recorder, 5..8);
    step(&mut recorder, 0..8);
    step(&mut recorder, 0..8);
    assert_eq!((seen.borrow().made, seen.borrow().effects.len()), (1, 40));
    // Forgotten without need, they are made again at once.
    recorder.pause = 0;
    recorder.forget();
    step(&mut recorder, 0..8);
    step(&mut recorder, 0..8);
    assert_eq!(seen.borrow().made, 2);
}

#[test]
fn what_cannot_be_submitted_to_make_room_is_told_by_the_next_call() {
    let (mut recorder, seen) = recorder(Bounds::new(64));
    step(&mut recorder, 0..8);
    step(&mut recorder, 0..8);
    push(&mut recorder, 0).unwrap();
    seen.borrow_mut().fails_to_launch = true;
    recorder.make_room();
    assert!(seen.borrow().programs.is_empty());
    seen.borrow_mut().fails_to_launch = false;
    assert_eq!(push(&mut recorder, 1).unwrap_err().message, "launch");
    push(&mut recorder, 1).unwrap();
}

#[test]
fn closing_submits_and_lets_go_of_everything() {
    let (mut recorder, seen) = recorder(Bounds::new(64));
    step(&mut recorder, 0..8);
    step(&mut recorder, 0..8);
    push(&mut recorder, 0).unwrap();
    recorder.close();
    assert!(seen.borrow().programs.is_empty());
    assert_eq!(seen.borrow().effects.len(), 17);
    push(&mut recorder, 1).unwrap();
    assert_eq!(seen.borrow().effects.len(), 18);
}

/// What a backend does with its queue.
#[derive(Debug, Clone)]
enum Act {
    Launch(u64),
    Busy(bool),
    Border,
}

/// Steps that mostly come again: a few patterns, each repeated, some with a change in the middle.
fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![12 => (0_u64..40).prop_map(Act::Launch), 1 => Just(Act::Border), 1 => any::<bool>().prop_map(Act::Busy)];
    let pattern = proptest::collection::vec(act, 1..60);
    let patterns = proptest::collection::vec(pattern, 1..4);
    let order = proptest::collection::vec(
        (0_usize..4, proptest::option::of((0_usize..60, 0_u64..40))),
        1..40,
    );
    (patterns, order).prop_map(|(patterns, order)| {
        let mut all = Vec::new();
        for (which, change) in order {
            let mut step = patterns[which % patterns.len()].clone();
            if let Some((at, id)) = change.filter(|(at, _)| at % 3 == 0) {
                let at = at % step.len();
                step[at] = Act::Launch(id);
            }
            all.extend(step);
            all.push(Act::Border);
        }
        all
    })
}

proptest! {
    #[test]
    fn effects_are_those_of_launching_at_once(
        acts in acts(),
        longest in prop_oneof![Just(0_usize), 1_usize..80],
        programs in 1_usize..6,
        nodes in 8_usize..200,
        seen_bound in 1_usize..8,
    ) {
        let bounds = Bounds { programs, nodes, seen: seen_bound, ..Bounds::new(longest) };
        let (mut recorder, seen) = recorder(bounds);
        let (mut plain, expected) = self::recorder(Bounds::new(0));
        for act in acts {
            match act {
                Act::Launch(id) => {
                    push(&mut recorder, id).unwrap();
                    push(&mut plain, id).unwrap();
                }
                Act::Busy(is_busy) => recorder.set_busy(is_busy).unwrap(),
                Act::Border => {
                    recorder.submit().unwrap();
                    // Whatever comes after the border finds everything before it submitted.
                    prop_assert_eq!(&seen.borrow().effects, &expected.borrow().effects);
                }
            }
            let count = expected.borrow().effects.len();
            prop_assert_eq!(&seen.borrow().effects[..], &expected.borrow().effects[..seen.borrow().effects.len()]);
            prop_assert!(count - seen.borrow().effects.len() < longest.max(1));
            prop_assert!(recorder.programs.len() <= programs && recorder.seen.len() <= seen_bound);
            let kept: usize = seen.borrow().programs.values().map(Vec::len).sum();
            prop_assert!(kept <= nodes && kept == recorder.nodes);
            prop_assert_eq!(seen.borrow().programs.len(), recorder.programs.len());
        }
        recorder.close();
        prop_assert_eq!(&seen.borrow().effects, &expected.borrow().effects);
        prop_assert!(seen.borrow().programs.is_empty());
    }
}
