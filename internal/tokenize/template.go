package tokenize

import (
	"context"
	"encoding/json"

	"prefixgate/internal/block"
	"prefixgate/internal/openai"
	"prefixgate/internal/tokenize/render"
)

// loadTemplate compiles the chat template of a model. It returns nil and the reason where there is none that can be used.
func (m *Model) loadTemplate(src *source) (*render.Template, string) {
	if len(src.chat.Templates) == 0 {
		return nil, "the model has no chat template: name one with chat_template"
	}
	opts := render.Options{Source: src.chat, Timeout: m.opts.Timeout, ExcludeToolsWhenChoiceNone: m.opts.ExcludeToolsWhenToolChoiceNone}
	if len(m.opts.DefaultChatTemplateKwargs) > 0 {
		kwargs, err := json.Marshal(m.opts.DefaultChatTemplateKwargs)
		if err != nil {
			panic("BUG: options that were validated: " + err.Error())
		}
		opts.DefaultKwargs = kwargs
	}
	switch m.opts.ContentFormat {
	case "string":
		opts.ContentFormat = render.FormatText
	case "openai":
		opts.ContentFormat = render.FormatParts
	}
	t, err := render.New(opts)
	if err != nil {
		return nil, err.Error()
	}
	return t, ""
}

// marks places the contents of a chat request that are not text. The template prints something in the place of each, which
// the engine then replaces by as many tokens as the content takes: up to the first of them positions are the engine's, after
// it the gateway's own, the same for equal requests.
//
// Where the place of one is not known, all are marked at the prompt's start: prompts with different contents then share less
// than they could, never more.
func (m *Model) marks(ctx context.Context, text string, addSpecial bool, keep int, images []openai.Image, media []render.Medium) ([]block.Mark, error) {
	if keep > 0 || len(media) != len(images) || addSpecial && !m.framing.exact {
		return unplaced(images), nil
	}
	marks := make([]block.Mark, len(images))
	for i, medium := range media {
		if !medium.Placed || medium.Message != images[i].Message || medium.Part != images[i].Part || i > 0 && medium.Start < media[i-1].Start {
			return unplaced(images), nil
		}
		// What comes before it is in the cache by now, or nearly all of it.
		before, err := m.encodeText(ctx, nil, text[:medium.Start], false, 0)
		if err != nil {
			return nil, err
		}
		token := len(before)
		if _, exact := m.chunks.rules.at(text, medium.Start); !exact && token > 0 {
			token-- // the placeholder may have grown together with what is before it
		}
		if addSpecial {
			token += len(m.framing.before)
		}
		marks[i] = block.Mark{Token: token, Digest: images[i].Digest}
	}
	return marks, nil
}

// unplaced marks all contents together at the prompt's start.
func unplaced(images []openai.Image) []block.Mark {
	if len(images) == 0 {
		return nil
	}
	all := block.Mark{}
	for _, image := range images {
		all.Digest = all.Digest*0x9e3779b97f4a7c15 + image.Digest
	}
	return []block.Mark{all}
}
