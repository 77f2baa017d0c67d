//! From an adapter and the headers of a GGUF file to a plan per tensor: which parts there will be, of
//! which type and shape, and how to make them. Reads no weights.
//!
//! Row selections act on the blocks as they are, so a packed tensor stays packed. The first operation
//! that cannot be put on blocks ends that stage; it and all later ones act on plain values.

use super::adapter::{AdapterError, AdapterOp};
use super::centred::{CentredForm, centred_form};
use super::ggml_type::GgmlType;
use super::header::GgufTensor;
use super::repack::{GROUP_SIZE, packed_bits};
use super::rows::RowMap;
use crate::checkpoint::dtype::{DType, TensorInfo, element_count};
use crate::checkpoint::quant::{QuantMode, QuantSpec};

const MAX_RANK: usize = 8;
const WORD_BITS: usize = 32;

/// An operation on plain values.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ValueOp {
    Add(f32),
    Transpose { rows: usize, columns: usize },
    Rows { map: RowMap, row_elements: usize },
}

/// How one tensor of the checkpoint is made.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    /// Name in the file.
    pub(super) from: String,
    pub(super) ty: GgmlType,
    /// Rows of the source that are used, and bytes and elements of one.
    pub(super) rows: RowMap,
    pub(super) row_bytes: usize,
    pub(super) row_elements: usize,
    /// Bits per code when the tensor stays packed.
    pub(super) bits: Option<u32>,
    /// Whether it is packed in the centred form.
    pub(super) is_centred: bool,
    /// Elements that share a scale when it stays packed.
    pub(super) group_size: usize,
    pub(super) value_ops: Vec<ValueOp>,
    /// Shape of the values.
    pub(super) shape: Vec<usize>,
}

/// Which of the tensors of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// The values, or the packed codes.
    Weight,
    Scales,
    Biases,
}

impl Plan {
    pub(super) fn new(
        tensor: &GgufTensor,
        to: &str,
        ops: &[AdapterOp],
        centred: &[CentredForm],
    ) -> Result<Self, AdapterError> {
        let row_elements = row_elements(tensor.ty, &tensor.shape);
        let total = tensor.shape.iter().product::<usize>() / row_elements.max(1);
        let is_packed = tensor.shape.len() >= 2 && to.ends_with(".weight");
        let form = centred_form(tensor.ty).filter(|form| centred.contains(form));
        let bits = form.map(|form| form.bits).or(packed_bits(tensor.ty));
        let mut planner = Planner {
            plan: Plan {
                from: tensor.name.clone(),
                ty: tensor.ty,
                rows: RowMap::all(total),
                row_bytes: row_elements / tensor.ty.block_elements() * tensor.ty.block_bytes(),
                row_elements,
                bits: bits.filter(|_| is_packed),
                is_centred: form.is_some(),
                group_size: form.map_or(GROUP_SIZE, |form| form.group_size as usize),
                value_ops: Vec::new(),
                shape: tensor.shape.clone(),
            },
            on_blocks: true,
        };
        for op in ops {
            planner.apply(op).map_err(|why| AdapterError::Op {
                op: op.name(),
                from: tensor.name.clone(),
                shape: planner.plan.shape.clone(),
                why,
            })?;
        }
        Ok(planner.plan)
    }

    /// How the tensor is quantised, if it stays packed.
    pub(super) fn quant(&self) -> Option<QuantSpec> {
        let group_size = self.group_size as u32;
        // Groups of 16 are known by their size, from before there was a mode for it.
        let mode = match self.is_centred && self.group_size == GROUP_SIZE {
            true => QuantMode::Centred,
            false => QuantMode::Affine,
        };
        self.bits.map(|bits| QuantSpec {
            mode,
            bits,
            group_size,
        })
    }

    /// Whether the values are made from blocks: their range is not known from the header.
    pub(super) fn is_dequantized(&self) -> bool {
        self.bits.is_none() && self.ty.block_elements() > 1
    }

    /// Whether an operation makes the values `F32`.
    pub(super) fn adds(&self) -> bool {
        self.value_ops
            .iter()
            .any(|op| matches!(op, ValueOp::Add(_)))
    }

    /// Type and shape of a part.
    pub(super) fn info(&self, part: Part) -> TensorInfo {
        let info = |dtype: DType, shape: Vec<usize>| {
            // The header's limits leave room for four bytes an element, and no operation adds elements.
            let byte_len = shape.iter().product::<usize>() * dtype.size_bytes();
            TensorInfo {
                dtype,
                shape,
                byte_len,
                may_widen: false,
            }
        };
        let Some(bits) = self.bits else {
            let mut info = info(self.value_dtype(), self.shape.clone());
            info.may_widen = self.is_dequantized() && !self.adds();
            return info;
        };
        let mut shape = self.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = match part {
                Part::Weight => *last / WORD_BITS * bits as usize,
                Part::Scales | Part::Biases => *last / self.group_size,
            };
        }
        if part == Part::Weight {
            return info(DType::U32, shape);
        }
        let mut info = info(self.factor_dtype(), shape);
        // The bias is a multiple of the scale here, and may leave the range of F16.
        info.may_widen =
            !self.is_centred && matches!(self.ty, GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0);
        info
    }

    fn value_dtype(&self) -> DType {
        match self.ty {
            _ if self.adds() => DType::F32,
            GgmlType::F32 => DType::F32,
            GgmlType::BF16 => DType::BF16,
            _ => DType::F16,
        }
    }

    /// Type of scales and biases: `F16` where they are halves in the file (or such a half times a power
    /// of two), `F32` where they are a product of two numbers.
    pub(super) fn factor_dtype(&self) -> DType {
        match self.ty {
            GgmlType::Q4_K | GgmlType::Q5_K | GgmlType::Q6_K => DType::F32,
            _ => DType::F16,
        }
    }

    /// What the checkpoint has of it.
    pub(super) fn parts(&self) -> &'static [Part] {
        match (self.bits, self.is_centred) {
            (None, _) => &[Part::Weight],
            (Some(_), true) => &[Part::Weight, Part::Scales],
            (Some(_), false) => &[Part::Weight, Part::Scales, Part::Biases],
        }
    }
}

/// Elements of a row, the unit that row selections move: the last dimension, or a single element of a
/// list of plain numbers (blocks of a list cannot be cut).
fn row_elements(ty: GgmlType, shape: &[usize]) -> usize {
    match shape {
        [] => 1,
        [_] if ty.block_elements() == 1 => 1,
        [.., last] => *last,
    }
}

/// As [`row_elements`], of plain values.
fn value_row_elements(shape: &[usize]) -> usize {
    match shape {
        [] | [_] => 1,
        [.., last] => *last,
    }
}

struct Planner {
    plan: Plan,
    /// Whether row selections still act on the blocks of the source.
    on_blocks: bool,
}

impl Planner {
    fn apply(&mut self, op: &AdapterOp) -> Result<(), String> {
        match op {
            AdapterOp::UnpermuteRope { heads } => self.unpermute_rope(*heads),
            AdapterOp::SliceRows { start, len } => self.slice_rows(*start, *len),
            AdapterOp::Reshape { shape } => self.reshape(shape),
            AdapterOp::Add { value } => self.add(*value),
            AdapterOp::Transpose {} => self.transpose(),
        }
    }

    fn unpermute_rope(&mut self, heads: usize) -> Result<(), String> {
        let (rows, row_elements) = match *self.plan.shape.as_slice() {
            [rows] => (rows, 1),
            [rows, columns] => (rows, columns),
            _ => return Err("expected one or two dimensions".to_owned()),
        };
        if heads == 0 || !rows.is_multiple_of(heads) || !(rows / heads).is_multiple_of(2) {
            return Err(format!(
                "{rows} rows cannot be cut into {heads} heads with an even number of rows"
            ));
        }
        self.select(rows, row_elements, |map| map.unpermute_rope(heads));
        Ok(())
    }

    fn slice_rows(&mut self, start: usize, len: usize) -> Result<(), String> {
        let row_elements = value_row_elements(&self.plan.shape);
        let total = self.plan.shape.iter().product::<usize>() / row_elements.max(1);
        let Some(outer) = self.plan.shape.first_mut() else {
            return Err("expected at least one dimension".to_owned());
        };
        let rows = *outer;
        if len == 0 || start.checked_add(len).is_none_or(|end| end > rows) {
            return Err(format!("expected at least one row, all inside 0..{rows}"));
        }
        *outer = len;
        let inner = total / rows.max(1);
        self.select(total, row_elements, |map| {
            map.slice(start * inner, len * inner)
        });
        Ok(())
    }

    /// Puts a row selection on the blocks if possible, else on the values.
    fn select(&mut self, total: usize, row_elements: usize, select: impl Fn(&RowMap) -> RowMap) {
        if self.on_blocks && self.plan.row_elements == row_elements {
            self.plan.rows = select(&self.plan.rows);
        } else {
            self.leave_blocks();
            let map = select(&RowMap::all(total));
            self.plan
                .value_ops
                .push(ValueOp::Rows { map, row_elements });
        }
    }

    fn reshape(&mut self, shape: &[usize]) -> Result<(), String> {
        if shape.is_empty() || shape.len() > MAX_RANK || shape.contains(&0) {
            return Err(format!(
                "expected 1 to {MAX_RANK} dimensions of at least 1, found {shape:?}"
            ));
        }
        let (found, expected) = (element_count(shape), element_count(&self.plan.shape));
        if found != expected {
            return Err(format!("{shape:?} has another number of elements"));
        }
        let keeps_rows = shape.len() >= 2 && shape.last() == self.plan.shape.last();
        if !keeps_rows || self.plan.shape.len() < 2 {
            self.leave_blocks();
        }
        self.plan.shape = shape.to_vec();
        Ok(())
    }

    fn add(&mut self, value: f32) -> Result<(), String> {
        if !value.is_finite() {
            return Err(format!("expected a finite value, found {value}"));
        }
        self.leave_blocks();
        self.plan.value_ops.push(ValueOp::Add(value));
        Ok(())
    }

    fn transpose(&mut self) -> Result<(), String> {
        let [rows, columns] = *self.plan.shape.as_slice() else {
            return Err("expected two dimensions".to_owned());
        };
        self.leave_blocks();
        self.plan
            .value_ops
            .push(ValueOp::Transpose { rows, columns });
        self.plan.shape = vec![columns, rows];
        Ok(())
    }

    fn leave_blocks(&mut self) {
        self.on_blocks = false;
        self.plan.bits = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(ty: GgmlType, shape: &[usize], to: &str, ops: &[AdapterOp]) -> Result<Plan, String> {
        plan_as(ty, shape, to, ops, &[])
    }

    fn plan_as(
        ty: GgmlType,
        shape: &[usize],
        to: &str,
        ops: &[AdapterOp],
        centred: &[CentredForm],
    ) -> Result<Plan, String> {
        let tensor = GgufTensor {
            name: "x".to_owned(),
            ty,
            shape: shape.to_vec(),
            range: 0..0,
        };
        Plan::new(&tensor, to, ops, centred).map_err(|error| error.to_string())
    }

    fn described(ty: GgmlType, shape: &[usize], to: &str, ops: &[AdapterOp]) -> String {
        parts_of(&plan(ty, shape, to, ops).unwrap())
    }

    fn parts_of(plan: &Plan) -> String {
        let parts = plan.parts().iter().map(|part| {
            let info = plan.info(*part);
            format!(
                "{} {:?}{}",
                info.dtype,
                info.shape,
                if info.may_widen { "?" } else { "" }
            )
        });
        parts.collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn types_decide_the_parts() {
        use GgmlType::*;
        let of = |ty| described(ty, &[4, 512], "a.weight", &[]);
        let found = GgmlType::ALL
            .map(|ty| format!("{ty}: {}", of(ty)))
            .join("\n");
        insta::assert_snapshot!(found, @r#"
        F32: F32 [4, 512]
        F16: F16 [4, 512]
        BF16: BF16 [4, 512]
        Q4_0: U32 [4, 64], F16 [4, 16]?, F16 [4, 16]?
        Q4_1: U32 [4, 64], F16 [4, 16], F16 [4, 16]
        Q5_0: U32 [4, 80], F16 [4, 16]?, F16 [4, 16]?
        Q5_1: U32 [4, 80], F16 [4, 16], F16 [4, 16]
        Q8_0: U32 [4, 128], F16 [4, 16]?, F16 [4, 16]?
        Q2_K: F16 [4, 512]?
        Q3_K: F16 [4, 512]?
        Q4_K: U32 [4, 64], F32 [4, 16], F32 [4, 16]
        Q5_K: U32 [4, 80], F32 [4, 16], F32 [4, 16]
        Q6_K: F16 [4, 512]?
        "#);
        assert_eq!(described(Q4_1, &[4, 64], "a.table", &[]), "F16 [4, 64]?");
        assert_eq!(described(Q4_1, &[64], "a.weight", &[]), "F16 [64]?");
        assert_eq!(
            described(Q4_1, &[2, 4, 64], "a.weight", &[]),
            "U32 [2, 4, 8], F16 [2, 4, 2], F16 [2, 4, 2]"
        );
    }

    #[test]
    fn a_centred_form_is_for_who_takes_it() {
        let taken = |bits, group_size, to: &str, ops: &[AdapterOp]| {
            let forms = [CentredForm { bits, group_size }];
            let plan = plan_as(GgmlType::Q6_K, &[4, 512], to, ops, &forms).unwrap();
            (parts_of(&plan), plan.quant().map(|spec| spec.to_string()))
        };
        let rows = [AdapterOp::UnpermuteRope { heads: 2 }];
        let packed = "U32 [4, 96], F32 [4, 32]".to_owned();
        let spec = Some("affine bits 6 group_size 16".to_owned());
        assert_eq!(taken(6, 16, "a.weight", &rows), (packed, spec));
        let plain = ("F16 [4, 512]?".to_owned(), None);
        assert_eq!(taken(6, 32, "a.weight", &rows), plain);
        assert_eq!(taken(6, 16, "a.table", &rows), plain);
        let plain = ("F16 [512, 4]?".to_owned(), None);
        assert_eq!(taken(6, 16, "a.weight", &[AdapterOp::Transpose {}]), plain);
        let forms = [CentredForm {
            bits: 8,
            group_size: 32,
        }];
        let of = |ty| plan_as(ty, &[4, 512], "a.weight", &rows, &forms).unwrap();
        let (eight, five) = (of(GgmlType::Q8_0), of(GgmlType::Q5_0));
        assert_eq!(parts_of(&eight), "U32 [4, 128], F16 [4, 16]");
        assert_eq!(
            eight.quant().map(|spec| spec.to_string()),
            Some("centred bits 8 group_size 32".to_owned())
        );
        assert_eq!(parts_of(&five), "U32 [4, 80], F16 [4, 16]?, F16 [4, 16]?");
    }

    #[test]
    fn operations_keep_or_leave_blocks() {
        use AdapterOp::*;
        use GgmlType::*;
        let packed = |ops: &[AdapterOp]| described(Q4_1, &[8, 64], "a.weight", ops);
        assert_eq!(
            packed(&[UnpermuteRope { heads: 2 }]),
            "U32 [8, 8], F16 [8, 2], F16 [8, 2]"
        );
        assert_eq!(
            packed(&[
                SliceRows { start: 2, len: 4 },
                Reshape {
                    shape: vec![2, 2, 64]
                }
            ]),
            "U32 [2, 2, 8], F16 [2, 2, 2], F16 [2, 2, 2]"
        );
        assert_eq!(
            packed(&[Reshape {
                shape: vec![16, 32]
            }]),
            "F16 [16, 32]?"
        );
        assert_eq!(packed(&[Transpose {}]), "F16 [64, 8]?");
        assert_eq!(
            packed(&[Add { value: 1.0 }, SliceRows { start: 0, len: 1 }]),
            "F32 [1, 64]"
        );
    }

    #[test]
    fn impossible_operations_say_why() {
        use AdapterOp::*;
        let refuse = |shape: &[usize], op: AdapterOp| {
            plan(GgmlType::F32, shape, "a.weight", &[op]).unwrap_err()
        };
        let refusals = [
            refuse(&[8, 4], UnpermuteRope { heads: 0 }),
            refuse(&[8, 4], UnpermuteRope { heads: 3 }),
            refuse(&[8, 4], UnpermuteRope { heads: 8 }),
            refuse(&[2, 8, 4], UnpermuteRope { heads: 2 }),
            refuse(&[8, 4], SliceRows { start: 4, len: 5 }),
            refuse(
                &[8, 4],
                SliceRows {
                    start: usize::MAX,
                    len: 2,
                },
            ),
            refuse(&[8, 4], SliceRows { start: 0, len: 0 }),
            refuse(&[8, 4], Reshape { shape: vec![5, 5] }),
            refuse(&[8, 4], Reshape { shape: vec![] }),
            refuse(
                &[8, 4],
                Reshape {
                    shape: vec![usize::MAX, 2],
                },
            ),
            refuse(&[8], Transpose {}),
            refuse(
                &[8],
                Add {
                    value: f32::INFINITY,
                },
            ),
        ];
        insta::assert_snapshot!(refusals.join("\n"), @r#"
        adapter: `unpermute_rope` on `x` of shape [8, 4]: 8 rows cannot be cut into 0 heads with an even number of rows
        adapter: `unpermute_rope` on `x` of shape [8, 4]: 8 rows cannot be cut into 3 heads with an even number of rows
        adapter: `unpermute_rope` on `x` of shape [8, 4]: 8 rows cannot be cut into 8 heads with an even number of rows
        adapter: `unpermute_rope` on `x` of shape [2, 8, 4]: expected one or two dimensions
        adapter: `slice_rows` on `x` of shape [8, 4]: expected at least one row, all inside 0..8
        adapter: `slice_rows` on `x` of shape [8, 4]: expected at least one row, all inside 0..8
        adapter: `slice_rows` on `x` of shape [8, 4]: expected at least one row, all inside 0..8
        adapter: `reshape` on `x` of shape [8, 4]: [5, 5] has another number of elements
        adapter: `reshape` on `x` of shape [8, 4]: expected 1 to 8 dimensions of at least 1, found []
        adapter: `reshape` on `x` of shape [8, 4]: [18446744073709551615, 2] has another number of elements
        adapter: `transpose` on `x` of shape [8]: expected two dimensions
        adapter: `add` on `x` of shape [8]: expected a finite value, found inf
        "#);
    }
}
