// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Architectural state of a paused VM as plain data, for snapshots: vCPU registers by their KVM
//! register IDs, and the registers of a GICv3 and its ITS by their offsets. Numbers and bytes are
//! hexadecimal strings, because JSON numbers lose bits above 2^53.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Error returned when a string is not a number or a byte string in hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HexError {
    /// Error returned when a number is not `0x` and 1 to 16 digits.
    #[error("'{0}' is not a 64-bit number in hexadecimal (0x...)")]
    Number(String),
    /// Error returned when a byte string has an odd number of digits, or another character.
    #[error("'{0}' is not a string of bytes in hexadecimal, two digits each")]
    Bytes(String),
}

/// A number, serialised as `0x` and hexadecimal digits.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HexNumber(pub u64);

impl TryFrom<String> for HexNumber {
    type Error = HexError;

    fn try_from(text: String) -> Result<Self, HexError> {
        let digits = text.strip_prefix("0x").filter(|digits| {
            // `from_str_radix` also accepts a sign.
            digits.bytes().all(|digit| digit.is_ascii_hexdigit())
        });
        let number = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        number.map(Self).ok_or(HexError::Number(text))
    }
}

impl From<HexNumber> for String {
    fn from(number: HexNumber) -> Self {
        number.to_string()
    }
}

impl fmt::Display for HexNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Debug for HexNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Bytes in memory order, serialised as two hexadecimal digits each.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HexBytes(pub Vec<u8>);

impl HexBytes {
    /// Returns the bytes of 32-bit registers.
    pub fn from_words(words: impl IntoIterator<Item = u32>) -> Self {
        Self(words.into_iter().flat_map(u32::to_le_bytes).collect())
    }

    /// Returns the 32-bit registers, or `None` unless there are exactly `count`.
    pub fn words(&self, count: usize) -> Option<Vec<u32>> {
        let (words, rest) = self.0.as_chunks();
        let words = words.iter().copied().map(u32::from_le_bytes);
        (words.len() == count && rest.is_empty()).then(|| words.collect())
    }

    /// Returns the little-endian number that the bytes encode, for messages.
    fn number(&self) -> String {
        let digits: String = self.0.iter().rev().map(|byte| format!("{byte:02x}")).collect();
        let digits = digits.trim_start_matches('0');
        format!("0x{}", if digits.is_empty() { "0" } else { digits })
    }
}

impl TryFrom<String> for HexBytes {
    type Error = HexError;

    fn try_from(text: String) -> Result<Self, HexError> {
        let digits =
            text.chars().map(|digit| digit.to_digit(16).and_then(|d| u8::try_from(d).ok()));
        match digits.collect::<Option<Vec<u8>>>() {
            Some(digits) if digits.len() % 2 == 0 => {
                Ok(Self(digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()))
            }
            _ => Err(HexError::Bytes(text)),
        }
    }
}

impl From<HexBytes> for String {
    fn from(bytes: HexBytes) -> Self {
        bytes.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for HexBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from(self.clone()))
    }
}

/// KVM register ID (`KVM_GET_ONE_REG`, `Documentation/virt/kvm/api.rst`). Displays a system
/// register as `S<op0>_<op1>_C<CRn>_C<CRm>_<op2>`, and any other by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RegisterId(HexNumber);

/// `KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM64_SYSREG`; `kvm-bindings` has them on arm64 only.
const SYSTEM_REGISTER: u64 = 0x6030_0000_0013_0000;
/// Bits of an ID that encode the operands of a system register.
const OPERANDS_MASK: u64 = 0xffff;

impl RegisterId {
    /// Returns the register with a KVM register ID.
    pub const fn new(id: u64) -> Self {
        Self(HexNumber(id))
    }

    /// Returns the system register with the operands op0, op1, CRn, CRm and op2 of `MRS`.
    pub const fn system([op0, op1, crn, crm, op2]: [u8; 5]) -> Self {
        let operands = (op0 as u64) << 14
            | (op1 as u64) << 11
            | (crn as u64) << 7
            | (crm as u64) << 3
            | op2 as u64;
        Self::new(SYSTEM_REGISTER | operands)
    }

    /// Returns the KVM register ID.
    pub const fn number(self) -> u64 {
        self.0.0
    }

    /// Returns the size of the register in bytes (bits 55:52 of the ID).
    pub const fn size(self) -> usize {
        1 << (self.number() >> 52 & 0xf)
    }

    /// Returns the operands of a system register, in 16 bits.
    pub const fn operands(self) -> u64 {
        self.number() & OPERANDS_MASK
    }
}

impl fmt::Display for RegisterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.number() & !OPERANDS_MASK != SYSTEM_REGISTER {
            return write!(f, "register {:#x}", self.number());
        }
        let field = |shift: u32, mask: u64| self.operands() >> shift & mask;
        let (op0, op1, op2) = (field(14, 3), field(11, 7), field(0, 7));
        write!(f, "S{op0}_{op1}_C{}_C{}_{op2}", field(7, 15), field(3, 15))
    }
}

/// Registers of the PMU that set bits of a mask, each with the one that clears them: `PMCNTENSET_EL0`,
/// `PMOVSSET_EL0` and `PMINTENSET_EL1` (Arm ARM, chapter D19.5). Both read as the mask.
const MASKS: [(RegisterId, RegisterId); 3] = [
    (RegisterId::system([3, 3, 9, 12, 1]), RegisterId::system([3, 3, 9, 12, 2])),
    (RegisterId::system([3, 3, 9, 14, 3]), RegisterId::system([3, 3, 9, 12, 3])),
    (RegisterId::system([3, 0, 9, 14, 1]), RegisterId::system([3, 0, 9, 14, 2])),
];

/// Returns whether a register clears bits of a mask, which the register that sets them restores.
#[must_use]
pub fn clears_mask(id: RegisterId) -> bool {
    MASKS.iter().any(|(_, clear)| *clear == id)
}

/// Returns the writes that give a register a value. `KVM_SET_ONE_REG` of a mask assigns it up to Linux
/// 6.1 and in 7.3, and sets or clears its bits in 6.12: all are cleared first, as the mask of a new vCPU
/// is not zero.
pub fn writes(id: RegisterId, value: &HexBytes) -> Vec<(RegisterId, HexBytes)> {
    let clear = MASKS.iter().find(|(set, _)| *set == id);
    let all_bits = clear.map(|(_, clear)| (*clear, HexBytes(vec![0xff; value.0.len()])));
    all_bits.into_iter().chain([(id, value.clone())]).collect()
}

/// State of a VM's vCPUs and interrupt controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineState {
    /// vCPUs, the boot vCPU first.
    pub vcpus: Vec<VcpuState>,
    /// Interrupt controller.
    pub gic: GicState,
}

/// State of a vCPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuState {
    /// Power state (`KVM_MP_STATE_*`).
    pub mp_state: u32,
    /// Pending exceptions.
    pub events: VcpuEvents,
    /// Values of all registers of `KVM_GET_REG_LIST`, little-endian.
    pub registers: BTreeMap<RegisterId, HexBytes>,
}

/// Pending exceptions of a vCPU (`kvm_vcpu_events`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuEvents {
    /// An SError is pending.
    pub serror_pending: bool,
    /// `serror_esr` is valid.
    pub serror_has_esr: bool,
    /// An external data abort is pending.
    pub ext_dabt_pending: bool,
    /// Syndrome of the SError.
    pub serror_esr: HexNumber,
}

/// Values of consecutive 32-bit registers, by the offset of the first.
pub type RegisterRanges = BTreeMap<HexNumber, HexBytes>;

/// State of a GICv3.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GicState {
    /// Number of SGIs, PPIs and SPIs.
    pub interrupts: u32,
    /// `GICD_IIDR`, which selects the behaviour of KVM's implementation.
    pub iidr: HexNumber,
    /// Distributor registers of the SPIs.
    pub distributor: RegisterRanges,
    /// Line levels of the SPIs, a bit each, 32 SPIs a word.
    pub levels: HexBytes,
    /// Redistributor and CPU interface of each vCPU.
    pub vcpus: Vec<GicVcpuState>,
    /// Interrupt translation service, if the VM has one.
    pub its: Option<ItsState>,
}

/// State of the redistributor and the CPU interface of a vCPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GicVcpuState {
    /// Affinity of the vCPU, as in `MPIDR_EL1`.
    pub affinity: HexNumber,
    /// Redistributor registers.
    pub redistributor: RegisterRanges,
    /// CPU interface registers (`ICC_*_EL1`).
    pub cpu_interface: BTreeMap<RegisterId, HexNumber>,
    /// Line levels of the PPIs, by INTID.
    pub levels: HexNumber,
}

/// Registers of an interrupt translation service. Its tables are in guest memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ItsState {
    /// `GITS_IIDR`, which selects the layout of the tables.
    pub iidr: HexNumber,
    /// `GITS_CTLR`.
    pub ctlr: HexNumber,
    /// `GITS_CBASER`.
    pub cbaser: HexNumber,
    /// `GITS_CREADR`.
    pub creadr: HexNumber,
    /// `GITS_CWRITER`.
    pub cwriter: HexNumber,
    /// `GITS_BASER0` to `GITS_BASER7`.
    pub basers: [HexNumber; 8],
}

/// A vCPU register that prevents the restoration of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisterMismatch {
    /// The register.
    pub id: RegisterId,
    /// Value in the snapshot, if it has the register.
    pub saved: Option<HexBytes>,
    /// Value on this host, if it has the register.
    pub host: Option<HexBytes>,
}

impl fmt::Display for RegisterMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = |bytes: &Option<HexBytes>| {
            bytes.as_ref().map_or_else(|| "missing".to_owned(), HexBytes::number)
        };
        let (saved, host) = (value(&self.saved), value(&self.host));
        write!(f, "{}: {saved} in the snapshot, {host} on this host", self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine_state() -> MachineState {
        let id = RegisterId::system([3, 0, 0, 7, 0]);
        let vcpu = GicVcpuState {
            affinity: HexNumber(0x1_0000_0001),
            redistributor: [(HexNumber(0x10100), HexBytes::from_words([0xffff]))].into(),
            cpu_interface: [(RegisterId::system([3, 0, 12, 12, 4]), HexNumber(0x400))].into(),
            levels: HexNumber(1 << 27),
        };
        MachineState {
            vcpus: vec![VcpuState {
                mp_state: 5,
                events: VcpuEvents::default(),
                registers: [(id, HexBytes(vec![0x22, 0x11, 0, 0, 0, 0, 0, 0x80]))].into(),
            }],
            gic: GicState {
                interrupts: 64,
                iidr: HexNumber(0x4b00_343b),
                distributor: [(HexNumber(0x6100), HexBytes::from_words([1, 2]))].into(),
                levels: HexBytes::from_words([3]),
                vcpus: vec![vcpu],
                its: Some(ItsState { cbaser: HexNumber(1 << 63), ..ItsState::default() }),
            },
        }
    }

    #[test]
    fn json_keeps_the_state() {
        let state = machine_state();

        let json = serde_json::to_string(&state).unwrap();

        assert_eq!(serde_json::from_str::<MachineState>(&json).unwrap(), state);
        for part in [
            r#""registers":{"0x603000000013c038":"2211000000000080"}"#,
            r#""distributor":{"0x6100":"0100000002000000"}"#,
            r#""cbaser":"0x8000000000000000""#,
        ] {
            assert!(json.contains(part), "{json}");
        }
    }

    #[test]
    fn unknown_fields_are_refused() {
        let json = serde_json::to_string(&machine_state()).unwrap();
        for field in ["mp_state", "interrupts", "affinity", "cbaser", "serror_esr", "gic"] {
            let unknown = json.replacen(&format!("\"{field}\":"), "\"other\":", 1);

            let error = serde_json::from_str::<MachineState>(&unknown).unwrap_err().to_string();

            assert!(error.contains("unknown field `other`"), "{error}");
        }
    }

    #[test]
    fn masks_are_restored_by_kernels_that_assign_and_that_set_and_clear() {
        for ((set, clear), has_bits, saved) in MASKS
            .into_iter()
            .flat_map(|pair| [(pair, false), (pair, true)])
            .flat_map(|(pair, has_bits)| [0u64, 1, 1 << 31].map(|saved| (pair, has_bits, saved)))
        {
            let mut mask = 0x8000_001e;

            for (id, value) in writes(set, &HexBytes(saved.to_le_bytes().to_vec())) {
                let value = u64::from_le_bytes(value.0.try_into().unwrap()) & 0x8000_003f;
                assert!(id == set || id == clear);
                mask = match (has_bits, id == clear) {
                    (false, _) => value,
                    (true, true) => mask & !value,
                    (true, false) => mask | value,
                };
            }

            assert_eq!(mask, saved, "{set}");
            assert!(clears_mask(clear) && !clears_mask(set));
        }
        let other = RegisterId::system([3, 0, 1, 0, 0]);
        assert_eq!(writes(other, &HexBytes(vec![1])), [(other, HexBytes(vec![1]))]);
    }

    #[test]
    fn malformed_hexadecimal_is_refused() {
        for text in ["", "12", "0x", "0xg", "0x+1", "0x10000000000000000"] {
            assert!(HexNumber::try_from(text.to_owned()).is_err(), "{text}");
        }
        for text in ["0", "123", "0x12", "+1", "1 ", "é1"] {
            assert!(HexBytes::try_from(text.to_owned()).is_err(), "{text}");
        }
        let error = serde_json::from_str::<HexBytes>("\"abc\"").unwrap_err().to_string();
        assert!(error.contains("'abc' is not a string of bytes"), "{error}");
        assert_eq!(HexBytes::try_from("A0ff".to_owned()), Ok(HexBytes(vec![0xa0, 0xff])));
    }

    #[test]
    fn words_have_the_expected_number() {
        let bytes = HexBytes::from_words([1, 0x8000_0000]);

        assert_eq!(bytes.words(2), Some(vec![1, 0x8000_0000]));
        assert_eq!(bytes.words(1), None);
        assert_eq!(HexBytes(vec![0; 5]).words(1), None);
    }

    #[test]
    fn messages_name_registers_by_their_operands() {
        let id = RegisterId::system([3, 0, 0, 7, 0]);
        let mismatch =
            RegisterMismatch { id, saved: Some(HexBytes(vec![0x22, 0x11, 0, 0])), host: None };

        assert_eq!(
            mismatch.to_string(),
            "S3_0_C0_C7_0: 0x1122 in the snapshot, missing on this host"
        );
        assert_eq!(id.size(), 8);
        let sve = RegisterId::new(0x6080_0000_0015_0000);
        assert_eq!(sve.to_string(), "register 0x6080000000150000");
        assert_eq!(sve.size(), 256);
    }
}
