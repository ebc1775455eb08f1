// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Functions of a kernel by address, from its `System.map`.

use std::ops::Range;

/// Alignment of a kernel's image, at which virtual, physical and hypervisor addresses are equal.
const IMAGE_ALIGNMENT: u64 = 2 << 20;

/// Place in a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Name of the function, without the suffix of a part that the compiler has split off.
    pub function: String,
    /// Bytes from its first instruction, or from that of the part.
    pub offset: u64,
    /// Indicates a part that the compiler has split off, and that is not called as the function.
    pub is_part: bool,
    /// Address in the kernel's image.
    pub address: u64,
}

/// Reports whether a symbol is the limit of a section, at which a function may begin.
fn is_limit(name: &str) -> bool {
    matches!(name, "_text" | "_stext" | "_etext")
        || name.ends_with("text_start")
        || name.ends_with("text_end")
}

/// Physical address to which QEMU loads an image without a text offset.
const IMAGE_LOADED_AT: u64 = 0x4020_0000;

/// Text symbols of a kernel.
#[derive(Debug, Default)]
pub struct SymbolTable {
    /// Addresses and names, sorted.
    symbols: Vec<(u64, String)>,
    /// Code that runs at EL2 without VHE, which has other addresses there.
    nvhe_text: Option<Range<u64>>,
    /// The image, whose code runs at its physical addresses while the kernel changes its own mapping.
    image: Option<Range<u64>>,
}

impl SymbolTable {
    /// Parses a `System.map`.
    pub fn parse(system_map: &str) -> Self {
        let mut table = Self::default();
        let (mut nvhe_start, mut nvhe_end) = (None, None);
        let (mut image_start, mut image_end) = (None, None);
        for line in system_map.lines() {
            let mut words = line.split_ascii_whitespace();
            let (Some(address), Some(kind), Some(name)) =
                (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let Ok(address) = u64::from_str_radix(address, 16) else { continue };
            match name {
                "__hyp_text_start" => nvhe_start = Some(address),
                "__hyp_text_end" => nvhe_end = Some(address),
                "_text" => image_start = Some(address),
                "_end" => image_end = Some(address),
                _ => {}
            }
            // `$x` marks code and `$d` data; they are no functions.
            if matches!(kind, "t" | "T" | "w" | "W") && !name.starts_with('$') {
                table.symbols.push((address, name.to_owned()));
            }
        }
        table.symbols.sort();
        table.image = image_start.zip(image_end).map(|(start, end)| start..end);
        table.nvhe_text = nvhe_start.zip(nvhe_end).map(|(start, end)| start..end);
        table
    }

    /// Returns the addresses of a function, without its cold parts.
    pub fn range(&self, name: &str) -> Option<Range<u64>> {
        let (start, _) = *self.symbols.iter().find(|(_, symbol)| symbol == name)?;
        Some(start..self.end(start))
    }

    /// Returns the parts of a function that the compiler has split off as unlikely to be executed:
    /// `NAME.cold`, or `NAME.cold.NUMBER`.
    pub fn cold_parts(&self, name: &str) -> Vec<Range<u64>> {
        let is_part = |symbol: &str| {
            let suffix = symbol.strip_prefix(name).and_then(|rest| rest.strip_prefix(".cold"));
            suffix.is_some_and(|suffix| suffix.is_empty() || suffix.starts_with('.'))
        };
        let parts = self.symbols.iter().filter(|(_, symbol)| is_part(symbol));
        parts.map(|(start, _)| *start..self.end(*start)).collect()
    }

    fn end(&self, start: u64) -> u64 {
        let next = self.symbols.partition_point(|(address, _)| *address <= start);
        self.symbols.get(next).map_or(start + 4, |(address, _)| *address)
    }

    /// Returns the place of an instruction.
    pub fn place(&self, address: u64) -> Option<Place> {
        let address = self.kernel_address(address)?;
        let next = self.symbols.partition_point(|(start, _)| *start <= address);
        let last = next.checked_sub(1)?;
        let (start, last_name) = &self.symbols[last];
        let mut same = self.symbols[..next].iter().rev().take_while(|(other, _)| other == start);
        let name = same.find(|(_, name)| !is_limit(name)).map_or(last_name, |(_, name)| name);
        let (function, suffix) = name.split_once('.').unwrap_or((name, ""));
        let function = function.strip_prefix("__kvm_nvhe_").unwrap_or(function);
        Some(Place {
            function: function.to_owned(),
            offset: address - start,
            is_part: suffix.split('.').any(|word| matches!(word, "cold" | "part")),
            address,
        })
    }

    /// Returns the address in the kernel's image of an instruction that may run at EL2, or at its
    /// physical address.
    fn kernel_address(&self, address: u64) -> Option<u64> {
        // An image without Linux may have no high address.
        let is_low = self.symbols.last().is_some_and(|(last, _)| last >> 63 == 0);
        if is_low {
            return Some(address);
        }
        if address >> 63 == 1 {
            // Code that is compiled later is outside.
            let is_known = self.image.as_ref().is_none_or(|image| image.contains(&address));
            return is_known.then_some(address);
        }
        if let (Some(image), Some(offset)) = (&self.image, address.checked_sub(IMAGE_LOADED_AT))
            && offset < image.end - image.start
        {
            return Some(image.start + offset);
        }
        let text = self.nvhe_text.as_ref()?;
        let kernel_address = (text.start & !(IMAGE_ALIGNMENT - 1)) + address % IMAGE_ALIGNMENT;
        let candidates = [kernel_address, kernel_address + IMAGE_ALIGNMENT];
        candidates.into_iter().find(|address| text.contains(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "ffff800010000000 T _text\n\
                       ffff800010000000 t $x\n\
                       ffff800010001000 t stage2_map_walk_leaf\n\
                       ffff800010001040 t stage2_map.part.0.isra.0\n\
                       ffff8000101ff000 T __hyp_text_start\n\
                       ffff8000101ff000 t __kvm_nvhe___tlb_switch_to_guest\n\
                       ffff800010200800 t __kvm_nvhe___kvm_tlb_flush_vmid\n\
                       ffff800010201000 T __hyp_text_end\n\
                       ffff800010300000 D data\n\
                       ffff800010400000 B _end\n";

    fn place(address: u64) -> Option<(String, u64)> {
        SymbolTable::parse(MAP).place(address).map(|place| (place.function, place.offset))
    }

    #[test]
    fn an_address_is_named_by_the_symbol_before_it_without_suffixes() {
        assert_eq!(place(0xffff_8000_1000_1010), Some(("stage2_map_walk_leaf".to_owned(), 0x10)));
        assert_eq!(place(0xffff_8000_1000_1044), Some(("stage2_map".to_owned(), 4)));
        assert_eq!(place(0xffff_8000_0000_0000), None);
    }

    #[test]
    fn code_at_el2_is_found_modulo_the_alignment_of_the_image() {
        let name = |name: &str| Some((name.to_owned(), 8));

        assert_eq!(place(0x7f00_401f_f008), name("__tlb_switch_to_guest"));
        assert_eq!(place(0x7f00_4020_0808), name("__kvm_tlb_flush_vmid"));
        assert_eq!(place(0x7f00_4010_0000), None);
    }

    #[test]
    fn code_at_its_physical_address_belongs_to_the_image() {
        assert_eq!(place(0x4020_1010), Some(("stage2_map_walk_leaf".to_owned(), 16)));
    }

    #[test]
    fn code_outside_of_the_image_and_limits_of_sections_are_no_functions() {
        let table = SymbolTable::parse(
            "ffff800010000000 T _text\nffff800010000100 t __do_softirq\n\
             ffff800010000100 T __softirqentry_text_start\nffff800010000200 t f.part.0\n\
             ffff800010001000 B _end\n",
        );

        let place = |offset: u64| {
            let place = table.place(0xffff_8000_1000_0000 + offset)?;
            Some((place.function, place.is_part))
        };

        assert_eq!(place(0x104), Some(("__do_softirq".to_owned(), false)));
        assert_eq!(place(0x200), Some(("f".to_owned(), true)));
        assert_eq!(place(0x1000), None);
    }

    #[test]
    fn an_image_without_linux_has_low_addresses() {
        let table = SymbolTable::parse("0000000040200000 T handle_exit\n");

        assert_eq!(table.place(0x4020_0008).unwrap().function, "handle_exit");
    }

    #[test]
    fn cold_parts_belong_to_their_function() {
        let table = SymbolTable::parse(
            "0000000000001000 t f\n0000000000001100 t f.cold\n0000000000001110 t f.cold.1\n\
             0000000000001120 t f.colder\n0000000000001130 t ff.cold\n",
        );

        assert_eq!(table.cold_parts("f"), [0x1100..0x1110, 0x1110..0x1120]);
        assert_eq!(table.cold_parts("g"), []);
    }

    #[test]
    fn a_function_ends_at_the_next_symbol() {
        let table = SymbolTable::parse(MAP);

        let range = table.range("stage2_map_walk_leaf");

        assert_eq!(range, Some(0xffff_8000_1000_1000..0xffff_8000_1000_1040));
        assert_eq!(table.range("stage2_map"), None);
    }
}
