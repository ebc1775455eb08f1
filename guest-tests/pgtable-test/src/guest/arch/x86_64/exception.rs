// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Descriptions of guest exceptions (Intel SDM volume 3, 7.15).

const PAGE_FAULT: u64 = 14;

/// Returns whether an exception stores an address in CR2.
pub const fn has_address(vector: u64) -> bool {
    vector == PAGE_FAULT
}

/// Describes an exception by its number and error code.
pub fn describe(vector: u64, error: u64) -> String {
    let what = match vector {
        0 => "a division by zero",
        1 | 3 => "a breakpoint",
        2 => "a non-maskable interrupt",
        6 => "an invalid instruction",
        7 => "floating point, which is disabled",
        8 => "a double fault",
        12 => "a stack segment fault",
        13 => return format!("general protection fault, error code {error:#x}"),
        PAGE_FAULT => return format!("page fault {}", page_fault(error)),
        17 => "a misaligned access",
        18 => "a machine check",
        _ => return format!("exception {vector}, error code {error:#x}"),
    };
    what.to_owned()
}

/// Describes the error code of a page fault.
fn page_fault(error: u64) -> String {
    let access = match error {
        _ if error & (1 << 4) != 0 => "by an instruction fetch",
        _ if error & (1 << 1) != 0 => "by a write",
        _ => "by a read",
    };
    let why = match error {
        _ if error & (1 << 3) != 0 => "a reserved bit is set in the guest's tables",
        _ if error & 1 != 0 => "the guest's tables do not permit it",
        _ => "the guest's tables map nothing there",
    };
    format!("{access}: {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_fault_is_described_by_access_and_reason() {
        assert_eq!(
            describe(14, 0b10),
            "page fault by a write: the guest's tables map nothing there"
        );
        assert_eq!(
            describe(14, 0b1_0001),
            "page fault by an instruction fetch: the guest's tables do not permit it"
        );
        assert!(has_address(14) && !has_address(13));
    }

    #[test]
    fn an_unknown_exception_is_described_by_number() {
        assert_eq!(describe(21, 3), "exception 21, error code 0x3");
    }
}
