package config

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/token"
)

// Load reads a configuration file. It does not validate. The error names the file, the line and the column.
func Load(path string) (*Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	c, err := Parse(data)
	if err != nil {
		return nil, fmt.Errorf("%s:%w", path, err)
	}
	return c, nil
}

// Parse decodes a configuration in YAML, strictly. An empty text is the zero Config. The error begins with line and column
// and quotes nothing of the text but keys, since what stands beside a mistake may be a secret.
func Parse(data []byte) (*Config, error) {
	c := &Config{}
	dec := yaml.NewDecoder(strings.NewReader(string(data)), yaml.Strict(),
		yaml.CustomUnmarshalerContext(func(_ context.Context, d *time.Duration, b []byte) error { return duration(d, b) }))
	err := dec.Decode(c)
	if errors.Is(err, io.EOF) {
		return c, nil
	}
	if err != nil {
		return nil, position(err)
	}
	if err := dec.Decode(&Config{}); !errors.Is(err, io.EOF) {
		return nil, errors.New("1:1: there is more than one document: keep one")
	}
	return c, nil
}

// errNoUnit is returned for a bare number where a duration is wanted.
var errNoUnit = errors.New("a duration needs a unit: write for example 500ms, 5s or 2m")

// duration reads a duration with its unit. A bare number would be taken for nanoseconds, which nobody means; only 0 needs no
// unit.
func duration(d *time.Duration, b []byte) error {
	text := strings.Trim(strings.TrimSpace(string(b)), `"'`)
	switch text {
	case "", "null", "~":
		return nil
	case "0":
		*d = 0
		return nil
	}
	v, err := time.ParseDuration(text)
	if err != nil {
		return errNoUnit
	}
	*d = v
	return nil
}

// position turns a decoder's error into one line that begins with where the mistake is.
func position(err error) error {
	var at yaml.Error
	if !errors.As(err, &at) {
		return fmt.Errorf("1:1: %w", err)
	}
	line, column := 1, 1
	if t := at.GetToken(); t != nil && t.Position != nil {
		line, column = t.Position.Line, t.Position.Column
	}
	message := at.GetMessage()
	switch {
	case strings.HasPrefix(message, "unknown field"):
		message += ": docs/configuration.md lists the keys"
	case strings.HasPrefix(message, "cannot unmarshal"), quotesValue(message, at.GetToken()):
		message = "the value has the wrong type"
	}
	return fmt.Errorf("%d:%d: %s", line, column, message)
}

// quotesValue says whether a message repeats a value of the file.
func quotesValue(message string, t *token.Token) bool {
	return t != nil && t.Value != "" && len(t.Value) > 3 && strings.Contains(message, t.Value)
}
