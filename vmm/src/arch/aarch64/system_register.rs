// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! System registers of the Arm architecture.

/// A system register by its encoding: the operands of `MRS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SystemRegister {
    /// Name in the Arm manual.
    pub name: &'static str,
    /// The operands op0, op1, CRn, CRm, op2.
    pub encoding: [u8; 5],
}
