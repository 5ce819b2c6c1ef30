//! `strftime_now`: the time of the render, formatted as C's strftime does in the C locale.

use std::cell::RefCell;

use minijinja::{Error, State, Value};

use super::python::type_error;

/// A moment on the wall clock of the zone that the caller chose.
#[derive(Clone, Debug, Default)]
pub struct Moment {
    pub year: i64,
    pub month: u32,
    pub day: u32,
    pub hour: u32,
    pub minute: u32,
    pub second: u32,
    pub micro: u32,
    /// Days since Sunday.
    pub weekday: u32,
    /// Days since the first of January.
    pub yearday: u32,
    pub unix: i64,
}

impl Moment {
    /// From seconds since 1970 as the zone's clock shows them (offset added), and the offset.
    pub fn new(unix: i64, micro: u32, offset: i64) -> Moment {
        let local = unix.saturating_add(offset);
        let (days, seconds) = (local.div_euclid(86_400), local.rem_euclid(86_400) as u32);
        // Howard Hinnant's civil-from-days: years of the era start in March.
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let mp = (5 * day_of_year + 2) / 153;
        let day = (day_of_year - (153 * mp + 2) / 5 + 1) as u32;
        let month = (if mp < 10 { mp + 3 } else { mp - 9 }) as u32;
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month as usize - 1];
        Moment {
            year,
            month,
            day,
            hour: seconds / 3600,
            minute: seconds / 60 % 60,
            second: seconds % 60,
            micro,
            weekday: (days + 4).rem_euclid(7) as u32,
            yearday: before + day - 1 + u32::from(leap && month > 2),
            unix,
        }
    }
}

thread_local! {
    static NOW: RefCell<Moment> = RefCell::new(Moment::default());
}

/// Sets the time of the renders that follow on this thread.
pub fn set(now: Moment) {
    NOW.set(now);
}

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
];

pub fn strftime_now(state: &State, format: &str) -> Result<Value, Error> {
    state.consume_fuel(format.len() as u64 / 4)?;
    NOW.with_borrow(|now| strftime(now, format)).map(Value::from)
}

/// `datetime.strftime` of a naive datetime.
pub fn strftime(t: &Moment, format: &str) -> Result<String, Error> {
    let mut out = String::with_capacity(format.len() + 32);
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut c = chars.next().unwrap_or('%');
        // glibc's flags: no padding, padding by spaces or zeros, upper case.
        let mut flag = None;
        while matches!(c, '-' | '_' | '0' | '^' | '#') {
            flag = Some(c);
            c = chars.next().unwrap_or('%');
        }
        let number = |n: i64, width: usize, pad: char| -> String {
            match (flag, pad) {
                (Some('-'), _) => n.to_string(),
                (Some('_'), _) => format!("{n:>width$}"),
                (Some('0'), _) | (_, '0') => format!("{n:0>width$}"),
                _ => format!("{n:>width$}"),
            }
        };
        let hour12 = i64::from(if t.hour.is_multiple_of(12) { 12 } else { t.hour % 12 });
        let day = DAYS[t.weekday as usize % 7];
        let month = MONTHS[(t.month as usize).saturating_sub(1) % 12];
        let text = match c {
            'a' => day[..3].to_string(),
            'A' => day.to_string(),
            'b' | 'h' => month[..3].to_string(),
            'B' => month.to_string(),
            'c' => strftime(t, "%a %b %e %H:%M:%S %Y")?,
            'C' => number(t.year.div_euclid(100), 2, '0'),
            'd' => number(t.day.into(), 2, '0'),
            'D' | 'x' => strftime(t, "%m/%d/%y")?,
            'e' => number(t.day.into(), 2, ' '),
            'f' => format!("{:06}", t.micro),
            'F' => strftime(t, "%Y-%m-%d")?,
            'G' => iso_week(t).0.to_string(),
            'g' => number(iso_week(t).0.rem_euclid(100), 2, '0'),
            'H' => number(t.hour.into(), 2, '0'),
            'I' => number(hour12, 2, '0'),
            'j' => number(i64::from(t.yearday) + 1, 3, '0'),
            'k' => number(t.hour.into(), 2, ' '),
            'l' => number(hour12, 2, ' '),
            'm' => number(t.month.into(), 2, '0'),
            'M' => number(t.minute.into(), 2, '0'),
            'n' => "\n".to_string(),
            'p' => if t.hour < 12 { "AM" } else { "PM" }.to_string(),
            'P' => if t.hour < 12 { "am" } else { "pm" }.to_string(),
            'r' => strftime(t, "%I:%M:%S %p")?,
            'R' => strftime(t, "%H:%M")?,
            's' => t.unix.to_string(),
            'S' => number(t.second.into(), 2, '0'),
            't' => "\t".to_string(),
            'T' | 'X' => strftime(t, "%H:%M:%S")?,
            'u' => if t.weekday == 0 { 7 } else { t.weekday }.to_string(),
            'U' => number(i64::from((t.yearday + 7 - t.weekday) / 7), 2, '0'),
            'V' => number(iso_week(t).1, 2, '0'),
            'w' => t.weekday.to_string(),
            'W' => number(i64::from((t.yearday + 7 - (t.weekday + 6) % 7) / 7), 2, '0'),
            'y' => number(t.year.rem_euclid(100), 2, '0'),
            'Y' => t.year.to_string(),
            // A naive datetime has no zone.
            'z' | 'Z' => String::new(),
            '%' => "%".to_string(),
            _ => return Err(type_error("unknown strftime directive")),
        };
        match flag {
            Some('^') => out.push_str(&text.to_uppercase()),
            _ => out.push_str(&text),
        }
    }
    Ok(out)
}

/// The year and week of ISO 8601.
fn iso_week(t: &Moment) -> (i64, i64) {
    let monday = (i64::from(t.weekday) + 6) % 7;
    let week = (i64::from(t.yearday) - monday + 10) / 7;
    let weeks = |y: i64| {
        let p = |y: i64| (y + y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400)).rem_euclid(7);
        if p(y) == 4 || p(y - 1) == 3 {
            53
        } else {
            52
        }
    };
    if week < 1 {
        (t.year - 1, weeks(t.year - 1))
    } else if week > weeks(t.year) {
        (t.year + 1, 1)
    } else {
        (t.year, week)
    }
}
