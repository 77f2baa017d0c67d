//! Blocks against a device that has only so much.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use mlxcel_abi::AbiError;
use proptest::prelude::*;

use super::*;

const MIB: usize = 1 << 20;

/// A device with so much memory, beside others that keep some of it.
#[derive(Debug, Default)]
struct Fake<'a> {
    bytes: usize,
    lent: RefCell<BTreeMap<usize, usize>>,
    /// What others would give up.
    kept_by_others: Cell<usize>,
    /// Bytes in use that are allowed; 0 is any number.
    limit: usize,
    is_lost: bool,
    fails_to_submit: Cell<bool>,
    submissions: Cell<usize>,
    rooms: Cell<usize>,
    /// A pool to which others give a block back while they make room, and the block.
    pool: Option<&'a Mutex<Blocks>>,
    of_others: Cell<Option<(usize, usize)>>,
}

impl Fake<'_> {
    fn of(bytes: usize) -> Self {
        Self {
            bytes,
            ..Self::default()
        }
    }

    fn left(&self) -> usize {
        self.bytes - self.lent.borrow().values().sum::<usize>() - self.kept_by_others.get()
    }
}

impl Source for Fake<'_> {
    fn check_room(&self, wanted: usize) -> Result<()> {
        if self.limit > 0 && wanted > self.limit {
            return Err(AbiError::new(status::RESOURCE_EXHAUSTED, "over the limit"));
        }
        Ok(())
    }

    fn allocate(&self, bytes: usize) -> Result<usize> {
        if self.is_lost {
            return Err(AbiError::internal("the device is lost"));
        }
        if bytes > self.left() {
            return Err(AbiError::new(status::RESOURCE_EXHAUSTED, "OUT_OF_MEMORY"));
        }
        let mut lent = self.lent.borrow_mut();
        let end = |(address, bytes): (&usize, &usize)| address + bytes;
        let address = lent.last_key_value().map_or(4096, end);
        lent.insert(address, bytes);
        Ok(address)
    }

    fn free(&self, address: usize) {
        let known = self.lent.borrow_mut().remove(&address);
        assert!(known.is_some(), "freed twice");
    }

    fn submit(&self) -> bool {
        self.submissions.set(self.submissions.get() + 1);
        !self.fails_to_submit.get()
    }

    fn make_room(&self) {
        self.rooms.set(self.rooms.get() + 1);
        self.kept_by_others.set(0);
        if let (Some(pool), Some((address, size))) = (self.pool, self.of_others.take()) {
            // As when MLX lets go of an array over a block of ours.
            lock(pool).keep(address, size);
        }
    }

    fn free_bytes(&self) -> Option<usize> {
        (!self.is_lost).then(|| self.left())
    }
}

fn give_back(blocks: &Mutex<Blocks>, source: &Fake<'_>, (address, size): (usize, usize)) {
    let mut blocks = lock(blocks);
    blocks.used_bytes -= size;
    if let Some(most) = blocks.keep(address, size) {
        blocks.trim(source, most);
    }
}

/// Bytes kept and in use.
fn figures(blocks: &Mutex<Blocks>) -> (usize, usize) {
    let blocks = lock(blocks);
    (blocks.kept_bytes, blocks.used_bytes)
}

#[test]
fn sizes_are_few_and_hardly_larger() {
    assert_eq!((rounded(0), rounded(1), rounded(513)), (512, 512, 1024));
    for bytes in [1 << 20, (1 << 20) + 1, 123_456_789, 4 << 30] {
        let size = rounded(bytes);
        assert!(
            size >= bytes && size <= bytes + bytes / 8 + 512,
            "{bytes}: {size}"
        );
        assert_eq!(rounded(size), size);
    }
}

#[test]
fn a_block_that_came_back_is_given_out_again_lowest_address_first() {
    let (blocks, device) = (Mutex::default(), Fake::of(16 * MIB));
    let three = [(); 3].map(|()| obtain(&blocks, &device, MIB).unwrap());
    for address in [three[2], three[0], three[1]] {
        give_back(&blocks, &device, (address, MIB));
    }
    assert_eq!(lock(&blocks).kept_bytes, 3 * MIB);
    let again = [(); 3].map(|()| obtain(&blocks, &device, MIB).unwrap());
    assert_eq!(again, three);
    assert_eq!(device.lent.borrow().len(), 3);
    assert_eq!(figures(&blocks), (0, 3 * MIB));
}

#[test]
fn free_blocks_of_other_sizes_go_back_before_anything_else_is_given_up() {
    let (blocks, device) = (Mutex::default(), Fake::of(4 * MIB));
    for size in [MIB, 2 * MIB] {
        let address = obtain(&blocks, &device, size).unwrap();
        give_back(&blocks, &device, (address, size));
    }
    obtain(&blocks, &device, 3 * MIB).unwrap();
    assert_eq!((device.rooms.get(), device.submissions.get()), (0, 1));
    assert_eq!(lock(&blocks).kept_bytes, 0);
}

#[test]
fn what_others_keep_is_given_up_before_a_call_fails() {
    let blocks = Mutex::default();
    let device = Fake {
        kept_by_others: Cell::new(3 * MIB),
        ..Fake::of(4 * MIB)
    };
    obtain(&blocks, &device, 2 * MIB).unwrap();
    assert_eq!(device.rooms.get(), 1);
}

#[test]
fn what_comes_back_while_others_give_up_is_had_at_once() {
    let blocks = Mutex::default();
    let mut device = Fake::of(4 * MIB);
    let address = obtain(&blocks, &device, 3 * MIB).unwrap();
    lock(&blocks).used_bytes -= 3 * MIB;
    device.pool = Some(&blocks);
    device.of_others.set(Some((address, 3 * MIB)));
    obtain(&blocks, &device, 4 * MIB).unwrap();
    assert_eq!(figures(&blocks), (0, 4 * MIB));
}

#[test]
fn a_device_without_memory_is_an_error_with_figures_and_counts_nothing() {
    let (blocks, device) = (Mutex::default(), Fake::of(4 * MIB));
    let held = obtain(&blocks, &device, MIB).unwrap();
    let error = obtain(&blocks, &device, 4 * MIB).unwrap_err();
    assert_eq!(error.code, status::RESOURCE_EXHAUSTED);
    assert_eq!(
        error.message,
        "4194304 bytes more are needed, the device has 3145728 free and 1048576 are in use here: lower the budget of the cache, or end what else uses the device (OUT_OF_MEMORY)"
    );
    assert_eq!(lock(&blocks).used_bytes, MIB);
    assert_eq!(lock(&blocks).peak_bytes, MIB);
    // The next call that fits is served.
    give_back(&blocks, &device, (held, MIB));
    obtain(&blocks, &device, 4 * MIB).unwrap();
}

#[test]
fn other_errors_are_told_as_they_are_and_nothing_is_given_up() {
    let blocks = Mutex::default();
    let device = Fake {
        is_lost: true,
        ..Fake::of(4 * MIB)
    };
    let error = obtain(&blocks, &device, MIB).unwrap_err();
    assert_eq!(
        (error.code, error.message.as_str()),
        (status::INTERNAL, "the device is lost")
    );
    assert_eq!((device.rooms.get(), device.submissions.get()), (0, 0));
}

#[test]
fn a_limit_holds_for_blocks_that_are_kept_too_and_not_for_small_ones() {
    let blocks = Mutex::default();
    let mut device = Fake::of(16 * MIB);
    let address = obtain(&blocks, &device, MIB).unwrap();
    give_back(&blocks, &device, (address, MIB));
    device.limit = 1;
    assert_eq!(
        obtain(&blocks, &device, MIB).unwrap_err().message,
        "over the limit"
    );
    obtain(&blocks, &device, 512).unwrap();
    assert_eq!(lock(&blocks).kept_bytes, MIB);
}

#[test]
fn blocks_stay_where_what_may_use_them_cannot_be_submitted() {
    let (blocks, device) = (Mutex::default(), Fake::of(2 * MIB));
    let address = obtain(&blocks, &device, MIB).unwrap();
    give_back(&blocks, &device, (address, MIB));
    device.fails_to_submit.set(true);
    assert!(obtain(&blocks, &device, 2 * MIB).is_err());
    assert_eq!(device.lent.borrow().len(), 1);
    device.fails_to_submit.set(false);
    obtain(&blocks, &device, 2 * MIB).unwrap();
}

#[test]
fn no_more_is_kept_than_a_part_of_what_is_in_use() {
    let (blocks, device) = (Mutex::default(), Fake::of(8 << 30));
    let size = 512 * MIB;
    let all: Vec<usize> = (0..8)
        .map(|_| obtain(&blocks, &device, size).unwrap())
        .collect();
    for address in all {
        give_back(&blocks, &device, (address, size));
        assert!(lock(&blocks).kept_bytes <= KEPT_BYTES);
    }
}

proptest! {
    /// Whatever is taken and given back, on a device that is nearly full: no address is given out twice, figures are the sums, and
    /// a call fails only where the device has less than it asks for beside what is in use.
    #[test]
    fn figures_hold_on_a_full_device(
        calls in proptest::collection::vec((any::<bool>(), 0_usize..8, 1_usize..5), 1..120),
        by_others in 0_usize..8,
    ) {
        let blocks = Mutex::default();
        let device = Fake { kept_by_others: Cell::new(by_others * MIB), ..Fake::of(10 * MIB) };
        let mut held: Vec<(usize, usize)> = Vec::new();
        for (gives_back, which, units) in calls {
            if gives_back && !held.is_empty() {
                let block = held.swap_remove(which % held.len());
                give_back(&blocks, &device, block);
            } else {
                let size = units * MIB;
                let used: usize = held.iter().map(|block| block.1).sum();
                match obtain(&blocks, &device, size) {
                    Ok(address) => {
                        prop_assert!(held.iter().all(|(other, n)| address + size <= *other || other + n <= address));
                        held.push((address, size));
                    }
                    Err(error) => {
                        prop_assert_eq!(error.code, status::RESOURCE_EXHAUSTED);
                        prop_assert!(used + size > 10 * MIB);
                    }
                }
            }
            let used: usize = held.iter().map(|block| block.1).sum();
            let lent: usize = device.lent.borrow().values().sum();
            prop_assert_eq!(lock(&blocks).used_bytes, used);
            prop_assert_eq!(lock(&blocks).kept_bytes + used, lent);
        }
    }
}

#[test]
fn an_address_is_found_in_the_block_that_is_constant() {
    let mut blocks = Blocks::default();
    blocks.constant.insert(1000, 100);
    blocks.constant.insert(2000, 50);
    for (address, expected) in [
        (999, None),
        (1000, Some(100)),
        (1099, Some(100)),
        (1100, None),
        (2049, Some(50)),
        (2050, None),
    ] {
        assert_eq!(blocks.constant_around(address), expected, "{address}");
    }
}
