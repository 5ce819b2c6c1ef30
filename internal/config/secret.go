package config

import "log/slog"

// redacted is what is shown instead of a secret.
const redacted = "[redacted]"

// Secret is a text that is never shown: not by fmt, not in logs, not when the configuration is written out.
type Secret string

// Reveal returns the text itself, for the one place that needs it.
func (s Secret) Reveal() string { return string(s) }

// String hides the text; an empty one stays empty, so that one can see that nothing is set.
func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return redacted
}

// GoString hides the text from %#v.
func (s Secret) GoString() string { return s.String() }

// LogValue hides the text from slog.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalText hides the text from encoders.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }
